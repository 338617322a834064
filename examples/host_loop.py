"""Three parts of tp-runtime inside a serving loop that owns its model, process group and cache.

torchrun --standalone --nproc-per-node 2 examples/host_loop.py

The host is a toy: one attention layer, every rank with half of the heads. It takes from here

- `TpGroup.from_process_group`: fast small all-reduces on the host's own process group,
- the channel and the selection: rank 0 measures, all agree, and rank 0 names the backend of each
  step over the host's own paged cache,
- `DecodeGraphs`: one graph per bucket and variant around the host's own step function.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from tp_runtime import DecodeGraphs, TpGroup
from tp_runtime.broadcast import CpuTpBroadcaster
from tp_runtime.selection import (
    BackendPlan,
    BackendSet,
    BenchRequest,
    DecodeShape,
    DecodeStep,
    DeviceInfo,
    PagedKV,
    agree,
    available_backends,
    device_check,
    measure_in_child,
    prepare_decode_backend,
    select,
)

HEADS, KV_HEADS, HEAD_DIM, PAGE, WIDTH, BUCKETS = 8, 4, 32, 16, 4, (2, 4)
HIDDEN, VOCAB = HEADS * HEAD_DIM, 97


@dataclass(frozen=True, kw_only=True)
class HostStep:
    """What the host sends each step: nothing but the graph to replay."""

    batch_size: int
    bucket: int
    variant: int


@dataclass(kw_only=True)
class HostModel:
    """The host's model and cache: this rank's heads of one layer, and its pages."""

    group: TpGroup
    shape: DecodeShape
    backend_of: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        size, rank, s = self.group.size, self.group.rank, self.shape
        make = torch.Generator().manual_seed(3)

        def whole(*n: int) -> torch.Tensor:
            return torch.randn(*n, generator=make) / n[-1] ** 0.5

        self.embedding, self.head = whole(VOCAB, HIDDEN) * HIDDEN**0.5, whole(VOCAB, HIDDEN)
        heads = slice(rank * HIDDEN // size, (rank + 1) * HIDDEN // size)
        kv = slice(rank * s.kv_heads * HEAD_DIM, (rank + 1) * s.kv_heads * HEAD_DIM)
        self.wq = whole(HIDDEN, HIDDEN)[heads]
        self.wk = whole(KV_HEADS * HEAD_DIM, HIDDEN)[kv]
        self.wv = whole(KV_HEADS * HEAD_DIM, HIDDEN)[kv]
        self.wo = whole(HIDDEN, HIDDEN)[:, heads]
        most = max(BUCKETS)
        self.k = torch.zeros(1 + most * WIDTH, s.kv_heads, PAGE, HEAD_DIM)
        self.v = torch.zeros_like(self.k)
        # page 0 is for padded rows; row r owns pages 1 + r * WIDTH ..
        table = torch.arange(1, 1 + most * WIDTH, dtype=torch.int32).view(most, WIDTH)
        self.inputs = {
            "token": torch.zeros(most, dtype=torch.int64),
            "length": torch.zeros(most, dtype=torch.int64),
            "table": table,
        }

    def step(
        self, inputs: dict[str, torch.Tensor], backends: BackendSet, name: str
    ) -> torch.Tensor:
        """One token for every row: the function that is captured."""
        token, length, table = inputs["token"], inputs["length"], inputs["table"]
        hidden = self.embedding[token]
        rows = len(token)
        q, k, v = ((hidden @ w.t()).view(rows, -1, HEAD_DIM) for w in (self.wq, self.wk, self.wv))
        page = table.gather(1, (length // PAGE)[:, None])[:, 0].long()
        self.k[page, :, length % PAGE] = k
        self.v[page, :, length % PAGE] = v
        out = torch.empty_like(q)
        kv = PagedKV(k=self.k, v=self.v, block_table=table, kv_lens=(length + 1).int())
        backends[name].forward(q, kv, out)
        mixed = self.group.all_reduce(out.view(rows, -1) @ self.wo.t())
        return (torch.tanh(3 * (hidden + mixed)) @ self.head.t()).argmax(-1)


def agreed_plan(channel: CpuTpBroadcaster, group: TpGroup, shape: DecodeShape) -> BackendPlan:
    """Rank 0 measures the backends for the host's heads; all ranks check and take one plan."""
    device = DeviceInfo.of(group.device)
    plan = None
    if group.rank == 0:
        offers = available_backends(shape, device)
        priority = [name for name, reason in offers if reason is None]
        request = BenchRequest(
            shape=shape,
            device=str(group.device),
            buckets=BUCKETS,
            kv_lens=(16, 64),
            repeats=3,
            threads=1,
        )
        report = measure_in_child(request, 60.0)
        priority = [name for name in priority if name not in report.refusals]
        plan = select(report.samples, priority=priority, buckets=BUCKETS, shape=shape)
    return agree(channel, plan, check=device_check(shape, device))


def decode(
    group: TpGroup, channel: CpuTpBroadcaster, prompts: list[int], steps: int
) -> dict[str, object]:
    """The host's loop: rank 0 names the graph, every rank replays it and advances its rows."""
    if KV_HEADS % group.size:
        raise ValueError(f"{KV_HEADS} key-value heads cannot be divided over {group.size} ranks")
    shape = DecodeShape(
        q_heads=HEADS // group.size,
        kv_heads=KV_HEADS // group.size,
        head_dim=HEAD_DIM,
        dtype="float32",
        page_size=PAGE,
        table_width=WIDTH,
    )
    plan = agreed_plan(channel, group, shape)
    backends = BackendSet(shape, group.device)
    for bucket in plan.buckets:
        for name in plan.variants(bucket):
            backends[name].prepare_for_capture(bucket)
    model = HostModel(group=group, shape=shape)
    graphs = DecodeGraphs(
        lambda inputs, bucket, variant: model.step(
            inputs, backends, plan.variants(bucket)[variant]
        ),
        inputs=model.inputs,
        buckets=BUCKETS,
        variants=lambda bucket: len(plan.variants(bucket)),
        device=group.device,
    )
    capture = graphs.capture()
    batch = len(prompts)
    model.inputs["token"][:batch] = torch.tensor(prompts)
    lengths = np.zeros(batch, dtype=np.int32)  # the host knows them by counting
    streams: list[list[int]] = [[] for _ in prompts]
    for _ in range(steps):
        if group.rank == 0:
            choice = plan.choose(
                batch_size=batch, total_kv=int(lengths.sum()) + batch, max_kv=int(lengths.max()) + 1
            )
            channel.publish([batch, choice.bucket, choice.variant])
            named = [batch, choice.bucket, choice.variant]
        else:
            named = channel.receive()
        step = HostStep(batch_size=named[0], bucket=named[1], variant=named[2])
        kv_lens = np.ones(step.bucket, dtype=np.int32)
        kv_lens[:batch] = lengths + 1
        prepare_decode_backend(
            plan,
            DecodeStep(batch_size=batch, bucket=step.bucket, variant=step.variant, kv_lens=kv_lens),
            backends=backends,
        )
        model.inputs["token"][batch:] = 0
        model.inputs["length"][batch:] = 0
        model.inputs["table"][batch:] = 0
        tokens = graphs.replay(step)[:batch]
        model.inputs["token"][:batch] = tokens
        model.inputs["length"][:batch] += 1
        lengths += 1
        for stream, token in zip(streams, tokens.tolist(), strict=True):
            stream.append(token)
    graphs.close()
    return {
        "rank": group.rank,
        "streams": streams,
        "plan_digest": plan.digest,
        "capture_digest": capture.digest,
    }


def run(steps: int = 40) -> dict[str, object]:
    """What a host does: its own init_process_group, then the parts it wants."""
    dist.init_process_group("gloo")
    group = TpGroup.from_process_group(dist.group.WORLD)
    folder = group.broadcast_bytes(
        tempfile.mkdtemp().encode() if group.rank == 0 else None
    ).decode()
    channel = CpuTpBroadcaster.join(
        rank=group.rank, world_size=group.size, address=Path(folder) / "host.sock"
    )
    if group.rank == 0:
        Path(folder).rmdir()  # the socket is gone from it: all have joined
    torch.set_num_threads(1)
    with torch.inference_mode():
        result = decode(group, channel, [3, 14, 15], steps)
    channel.close()
    group.close()
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    result = run()
    if result["rank"] == 0:
        print(result)
