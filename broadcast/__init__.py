"""One-to-all channel between the ranks of one host. Imports no torch.

Rank 0 publishes, the peers receive, every wait has a deadline, every death is noticed:

    channel = CpuTpBroadcaster.join(rank=rank, world_size=2, address="/run/user/1000/tp/step")
    if rank == 0:
        channel.publish({"step": 1, "slots": [0, 3]})
        receipt = channel.confirm({"plan": plan_bytes})     # receipt.committed, .refusals
    else:
        step = channel.receive()
        plan = channel.receive()
        committed = channel.acknowledge(True)
    channel.close()
"""

if __name__ != "tp_runtime.broadcast":
    raise ImportError("import tp_runtime.broadcast, not broadcast")

from tp_runtime.broadcast.broadcaster import CpuTpBroadcaster, Receipt
from tp_runtime.broadcast.codec import Message
from tp_runtime.broadcast.config import BroadcasterConfig, WaitMode
from tp_runtime.broadcast.statistics import BroadcasterStatistics, PeerStatistics
from tp_runtime.errors import (
    BroadcastError,
    ChannelClosed,
    DeadlineExceeded,
    HandshakeRefused,
    PeerLost,
    ProtocolError,
)

__all__ = [
    "BroadcastError",
    "BroadcasterConfig",
    "BroadcasterStatistics",
    "ChannelClosed",
    "CpuTpBroadcaster",
    "DeadlineExceeded",
    "HandshakeRefused",
    "Message",
    "PeerLost",
    "PeerStatistics",
    "ProtocolError",
    "Receipt",
    "WaitMode",
]
