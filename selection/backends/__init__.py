"""Decode attention backends, one file each. The registry imports them when they are asked about."""
