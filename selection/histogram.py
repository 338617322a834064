"""A user's own KV lengths: a text file with how often each was seen.

One length in tokens to a line, optionally followed by a count (1 without); blank lines and what
follows a # are skipped::

    # tokens  requests
    180       1200
    950       430
    7000      25
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tp_runtime.errors import ConfigError
from tp_runtime.regular_file import read_regular

if TYPE_CHECKING:
    from tp_runtime.selection.bench import BenchRequest

log = logging.getLogger(__name__)

_BATCHES = 3  # of each bucket
_MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthHistogram:
    """KV lengths in tokens, ascending and distinct, and how often each was seen."""

    lengths: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def read(cls, path: str | Path) -> LengthHistogram:
        """Read a file.

        Raises: ConfigError: it cannot be read, or a line is not as described; names the line.
        """
        path = Path(path)
        try:
            lines = read_regular(path, most_bytes=_MOST_BYTES).decode("utf-8").splitlines()
        except OSError as error:
            raise ConfigError(
                f"length histogram {path}: cannot be read: {error.strerror or error}"
            ) from error
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"length histogram {path}: cannot be read: expected UTF-8 text: {error}"
            ) from error
        seen: dict[int, int] = {}
        for number, line in enumerate(lines, 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            # digits alone: int() takes more than a person means
            plain = all(w.isascii() and w.isdigit() and 0 < len(w) < 16 for w in words)
            if len(words) > 2 or not plain or min(map(int, words)) < 1:
                raise ConfigError(
                    f"length histogram {path}, line {number}: expected a length in tokens and "
                    f"perhaps a count, both at least 1, got {line.strip()!r}"
                )
            length, count = (*map(int, words), 1)[:2]
            seen[length] = seen.get(length, 0) + count
        if not seen:
            raise ConfigError(f"length histogram {path}: holds no length")
        lengths = tuple(sorted(seen))
        return cls(lengths=lengths, counts=tuple(seen[n] for n in lengths))

    def added_to(self, request: BenchRequest) -> BenchRequest:
        """The request with batches of every bucket drawn from these lengths, by its seed.

        Lengths beyond the longest sequence count as that: such a request ends there. Batches with
        more than twice the request's `max_total_kv` tokens are left out, as its own are. The log
        tells of both.
        """
        longest = request.shape.max_kv_len
        beyond = sum(c for n, c in zip(self.lengths, self.counts, strict=True) if n > longest)
        if beyond:
            log.warning(
                "length histogram: %d of %d requests are longer than %d tokens, the longest "
                "sequence here; they are taken as that long",
                beyond,
                sum(self.counts),
                longest,
            )
        weights = np.array(self.counts, np.float64)
        weights /= weights.sum()
        rng = np.random.default_rng([request.seed, 1])
        drawn_rows: list[tuple[int, ...]] = []
        for bucket in sorted(set(request.buckets)):
            drawn = rng.choice(self.lengths, (_BATCHES, bucket), p=weights)
            drawn_rows += [tuple(int(n) for n in row) for row in np.minimum(drawn, longest)]
        most = 2 * request.max_total_kv
        batches = [row for row in drawn_rows if sum(row) <= most]
        if len(batches) < len(drawn_rows):
            log.warning(
                "length histogram: %d of %d batches drawn from it have more than %d tokens and are "
                "not measured",
                len(drawn_rows) - len(batches),
                len(drawn_rows),
                most,
            )
        return replace(request, batches=(*request.batches, *dict.fromkeys(batches)))
