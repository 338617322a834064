"""Runs step plans on one rank: the same code on every rank, driven by nothing but the plan.

A decode step gathers by slot, runs the model, samples, and advances tokens and lengths in place,
all on the device. It runs over static buffers of the bucket's size, so that a CUDA graph can be
captured of it; padded rows use the dummy slot, whose length never grows and whose keys and values
go to the dummy block. Prefill and mixed steps run eagerly: their shapes change every step, and one
chunk fills the device without a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tp_runtime.attention import DecodeRows, PromptChunk, StepAttention
from tp_runtime.errors import CaptureError, ProtocolError
from tp_runtime.graphs import DecodeGraphs
from tp_runtime.ops.sampling import SamplerMode, gather_vocab_sizes, sample
from tp_runtime.ops.step_state import begin_step, end_step
from tp_runtime.selection import DecodeStep, prepare_decode_backend
from tp_runtime.step_plan import StepKind
from tp_runtime.step_times import Phase, StepTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tp_runtime.attention import KvCache
    from tp_runtime.device_state import DeviceState
    from tp_runtime.device_times import DeviceTimes
    from tp_runtime.graphs import CaptureReport
    from tp_runtime.group import TpGroup
    from tp_runtime.layers.products import ProductPlan
    from tp_runtime.models.base import DecodeModel
    from tp_runtime.ops.step_state import StepRows
    from tp_runtime.selection import BackendPlan, BackendSet, DecodeBackend
    from tp_runtime.step_plan import StepPlan

SAMPLERS = len(SamplerMode)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphStep:
    """A decode step as `DecodeGraphs` sees it: variant counts backend and sampler together."""

    batch_size: int
    bucket: int
    variant: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Slots that decode together, in every form that a step needs. index: int64 on the host."""

    rows: tuple[int, ...]
    index: np.ndarray[tuple[int], np.dtype[np.int64]]
    slots: Tensor
    mode: SamplerMode


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """How the rows of a step with prompts are sampled; the fields are those of `StepRows`."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    next_positions: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerStatistics:
    """Steps by how they ran. `eager_decode_steps` are pure decode steps without a bucket."""

    graph_steps: int
    eager_decode_steps: int
    prefill_steps: int
    mixed_steps: int
    padded_rows: int


class StepRunner:
    """One rank's part of every step. One owner thread."""

    def __init__(
        self,
        *,
        model: DecodeModel,
        group: TpGroup,
        state: DeviceState,
        cache: KvCache,
        plan: BackendPlan,
        backends: BackendSet,
        buckets: Sequence[int],
        times: StepTimes,
        products: ProductPlan | None = None,
    ) -> None:
        self._model = model
        self._group = group
        self._state = state
        self._cache = cache
        self._plan = plan
        self._backends = backends
        self._times = times
        self._products = "-" if products is None else products.digest[:16]
        self._slots = torch.full(
            (max(buckets),), state.dummy_slot, dtype=torch.int64, device=state.device
        )
        self._graphs = DecodeGraphs(
            self._graph_step,
            inputs={"slots": self._slots},
            buckets=buckets,
            variants={bucket: len(plan.variants(bucket)) * SAMPLERS for bucket in buckets},
            device=state.device,
            describe=self._describe_graph,
        )
        shape = model.shape
        self._vocab_sizes = gather_vocab_sizes(
            group, shape.vocab_end - shape.vocab_start, state.device
        )
        self._batch: Batch | None = None
        self._filled_bucket: int | None = None
        self._next_step = 0
        self._graph_steps = self._eager_steps = self._prefill_steps = self._mixed_steps = 0
        self._padded_rows = 0
        self._device_times: DeviceTimes | None = None

    def time_device(self, times: DeviceTimes | None) -> None:
        """Mark every step from here on; None ends it."""
        self._device_times = times

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None] | None = None) -> CaptureReport:
        """Capture every bucket and variant; on a CPU the static step is prepared instead."""
        for bucket in self._plan.buckets:
            for name in self._plan.variants(bucket):
                self._backends[name].prepare_for_capture(bucket)
        alone = self._group.size == 1
        return self._graphs.capture(progress, before_each=None if alone else self._group.barrier)

    @property
    def dropped(self) -> dict[tuple[int, int], str]:
        """(bucket, graph) that this rank could not capture, with the reason."""
        return self._graphs.dropped

    def drop(self, graphs: dict[tuple[int, int], str]) -> CaptureReport:
        """Give up graphs that some rank could not capture; see `DecodeGraphs.drop`."""
        return self._graphs.drop(graphs)

    def can_run(self, batch_size: int, bucket: int, variant: int) -> tuple[bool, str]:
        """Whether every sampler's graph of (bucket, variant) exists. Pure; asked by rank 0."""
        for mode in SamplerMode:
            step = GraphStep(
                batch_size=batch_size, bucket=bucket, variant=variant * SAMPLERS + mode
            )
            able, reason = self._graphs.can_run(step)
            if not able:
                return False, reason
        return True, ""

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Tensor | None:
        """Run one step.

        Returns:
            int64 [sampled rows], the tokens on the device: the decode rows in order, then the
            chunks that sample. None when nothing was sampled. On a GPU it is overwritten by the
            next replay of the same bucket.

        Raises:
            ProtocolError: the plan does not follow the one before, or cannot be applied.
            CaptureError: the plan names a graph that this rank does not hold.
        """
        if plan.step != self._next_step:
            raise ProtocolError(
                f"rank {self._group.rank}: expected step {self._next_step}, got {plan.step}"
            )
        self._next_step += 1
        if plan.kind in (StepKind.IDLE, StepKind.STOP):
            return None
        with self._times.measure(plan.step, Phase.PREPARE):
            rows = self._state.apply(plan)
            if plan.admits:
                self._batch = None  # the same slots may now be other requests
        run = self._decode if plan.kind is StepKind.DECODE else self._mixed
        if self._device_times is None:
            return run(plan, rows)
        self._device_times.begin()
        tokens = run(plan, rows)
        self._device_times.end()
        return tokens

    def close(self) -> None:
        """Destroy the graphs; before the group, whose collectives they hold."""
        self._graphs.close()

    def statistics(self) -> RunnerStatistics:
        return RunnerStatistics(
            graph_steps=self._graph_steps,
            eager_decode_steps=self._eager_steps,
            prefill_steps=self._prefill_steps,
            mixed_steps=self._mixed_steps,
            padded_rows=self._padded_rows,
        )

    def _decode(self, plan: StepPlan, rows: tuple[int, ...]) -> Tensor:
        with self._times.measure(plan.step, Phase.PREPARE):
            batch = self._batch_of(rows)
            step = self._decode_step(batch, plan.bucket, plan.variant)
            backend = prepare_decode_backend(self._plan, step, backends=self._backends)
            if plan.bucket is not None:
                self._fill_slots(batch, plan.bucket)
        with self._times.measure(plan.step, Phase.MODEL):
            if plan.bucket is None:
                self._eager_steps += 1
                tokens = self._decode_rows(batch.slots, backend, batch.mode)
            else:
                self._graph_steps += 1
                self._padded_rows += plan.bucket - len(rows)
                tokens = self._replay(plan, batch, plan.bucket)
        self._state.advance_host(batch.index)
        return tokens[: len(rows)]

    def _batch_of(self, rows: tuple[int, ...]) -> Batch:
        """The batch of these slots; the one of the step before where they are the same."""
        if self._batch is None or self._batch.rows is not rows:
            index = np.array(rows, dtype=np.int64)
            (slots,) = self._state.uploads.send(index)
            self._batch = Batch(
                rows=rows,
                index=index,
                slots=slots.clone(),
                mode=self._state.sampler_mode(rows),
            )
            self._filled_bucket = None
        return self._batch

    def _fill_slots(self, batch: Batch, bucket: int) -> None:
        """Put the batch into the static buffer; every row beyond it is the dummy slot's."""
        if self._filled_bucket != bucket:
            self._slots[: len(batch.rows)].copy_(batch.slots)
            self._slots[len(batch.rows) : bucket] = self._state.dummy_slot
            self._filled_bucket = bucket

    def _decode_step(self, batch: Batch, bucket: int | None, variant: int) -> DecodeStep:
        count = len(batch.rows)
        kv_lens = np.ones(bucket or count, dtype=np.int32)
        kv_lens[:count] += self._state.host_length[batch.index]
        return DecodeStep(batch_size=count, kv_lens=kv_lens, bucket=bucket, variant=variant)

    def _replay(self, plan: StepPlan, batch: Batch, bucket: int) -> Tensor:
        step = GraphStep(
            batch_size=len(batch.rows),
            bucket=bucket,
            variant=plan.variant * SAMPLERS + batch.mode,
        )
        try:
            tokens: Tensor = self._graphs.replay(step)
        except CaptureError as error:
            raise CaptureError(f"rank {self._group.rank}: step {plan.step}: {error}") from error
        return tokens

    def _graph_step(self, inputs: dict[str, Tensor], bucket: int, variant: int) -> Tensor:
        """The step function that is captured; also runs as it is on a CPU."""
        name = self._plan.variants(bucket)[variant // SAMPLERS]
        return self._decode_rows(
            inputs["slots"], self._backends[name], SamplerMode(variant % SAMPLERS)
        )

    def _describe_graph(self, bucket: int, variant: int) -> dict[str, str | int]:
        backend = self._plan.variants(bucket)[variant // SAMPLERS]
        return {
            "backend": backend,
            "sampler": SamplerMode(variant % SAMPLERS).name,
            "table_width": self._state.block_table.shape[1],
            "products": self._products,
            "sums": self._group.reduce_plan.digest[:16],
        }

    def _decode_rows(self, slots: Tensor, backend: DecodeBackend, mode: SamplerMode) -> Tensor:
        """One token for each slot; rows of the dummy slot change nothing that is ever read."""
        state = self._state
        rows, decode = self._decode_part(slots, backend)
        attention = StepAttention(self._cache, cache_rows=rows.cache_rows, decode=decode)
        hidden = self._model.forward(rows.token_ids, rows.positions, attention)
        tokens = self._sample(hidden, rows, mode)
        end_step(slots, tokens, state)
        return tokens

    def _decode_part(self, slots: Tensor, backend: DecodeBackend) -> tuple[StepRows, DecodeRows]:
        cache = self._cache
        rows = begin_step(slots, self._state, kv_heads=cache.kv_heads, page_size=cache.page_size)
        decode = DecodeRows(backend=backend, block_table=rows.block_table, kv_lens=rows.kv_lens)
        return rows, decode

    def _mixed(self, plan: StepPlan, rows: tuple[int, ...]) -> Tensor | None:
        """Decode rows, if any, and prompt chunks in one forward pass."""
        state, cache, device = self._state, self._cache, self._state.device
        with self._times.measure(plan.step, Phase.PREPARE):
            decode = None
            tokens, positions, cache_rows = [], [], []
            if rows:
                self._mixed_steps += 1
                batch = self._batch_of(rows)
                step = self._decode_step(batch, None, 0)
                backend = prepare_decode_backend(self._plan, step, backends=self._backends)
                decoding, decode = self._decode_part(batch.slots, backend)
                positions.append(decoding.positions)
                tokens.append(decoding.token_ids)
                cache_rows.append(decoding.cache_rows)
            else:
                self._prefill_steps += 1
            chunks, last_rows, total = [], [], len(rows)
            prompt_tokens = self._state.uploads.send(
                *(chunk.token_ids.astype(np.int64) for chunk in plan.chunks)
            )
            tokens.extend(prompt_tokens)
            for chunk in plan.chunks:
                self._check_chunk(plan, chunk.slot, chunk.start, chunk.end)
                where = torch.arange(chunk.start, chunk.end, device=device)
                table = state.block_table[chunk.slot].to(torch.int64)
                cache_rows.append(cache.rows_of(table[where // cache.page_size], where))
                positions.append(where)
                pages = table[: -(-chunk.end // cache.page_size)]
                chunks.append(PromptChunk.make(start=chunk.start, end=chunk.end, pages=pages))
                total += chunk.end - chunk.start
                if chunk.samples:
                    last_rows.append(total - 1)
            attention = StepAttention(
                cache, cache_rows=torch.cat(cache_rows), decode=decode, chunks=chunks
            )
        with self._times.measure(plan.step, Phase.MODEL):
            where = torch.cat(positions)
            hidden = self._model.forward(torch.cat(tokens), where, attention)
            sampled = self._sample_mixed(plan, rows, last_rows, hidden, where)
        if rows:
            state.advance_host(batch.index)
            state.length.index_add_(0, batch.slots, torch.ones_like(batch.slots))
        for chunk in plan.chunks:
            state.length.narrow(0, chunk.slot, 1).fill_(chunk.end)  # `[slot] =` waits on a GPU
            state.host_length[chunk.slot] = chunk.end
        return sampled

    def _sample_mixed(
        self,
        plan: StepPlan,
        rows: tuple[int, ...],
        last_rows: list[int],
        hidden: Tensor,
        positions: Tensor,
    ) -> Tensor | None:
        sampling = (*rows, *(chunk.slot for chunk in plan.chunks if chunk.samples))
        if not sampling:
            return None
        slots, picked = self._state.uploads.send(
            np.array(sampling, dtype=np.int64),
            np.array([*range(len(rows)), *last_rows], dtype=np.int64),
        )
        state = self._state
        asked = SampledRows(
            temperature=state.temperature[slots],
            top_k=state.top_k[slots],
            top_p=state.top_p[slots],
            min_p=state.min_p[slots],
            seed=state.seed[slots],
            next_positions=positions[picked] + 1,
        )
        tokens = self._sample(hidden[picked], asked, state.sampler_mode(sampling))
        state.last_token[slots] = tokens.clamp(min=0)
        return tokens

    def _sample(self, hidden: Tensor, rows: StepRows | SampledRows, mode: SamplerMode) -> Tensor:
        """Draw the tokens that stand at the rows' next positions; equal on every rank."""
        return sample(
            self._model.logits(hidden),
            vocab_start=self._model.shape.vocab_start,
            temperature=rows.temperature,
            top_k=rows.top_k,
            top_p=rows.top_p,
            min_p=rows.min_p,
            seed=rows.seed,
            position=rows.next_positions,
            mode=mode,
            group=self._group,
            vocab_sizes=self._vocab_sizes,
        )

    def _check_chunk(self, plan: StepPlan, slot: int, start: int, end: int) -> None:
        have = int(self._state.host_length[slot])
        most = self._state.block_table.shape[1] * self._cache.page_size
        if start != have or end > most:
            raise ProtocolError(
                f"rank {self._group.rank}: step {plan.step} prefills slot {slot} from {start} to "
                f"{end}, expected from {have} and at most to {most}"
            )
