"""The device form of sampling against the CPU form, and inside a captured graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tp_runtime.graphs import DecodeGraphs
from tp_runtime.group import TpGroup
from tp_runtime.ops import noise
from tp_runtime.ops.sampling import INVALID_TOKEN, SamplerMode, sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

ROWS, VOCAB = 64, 50_000


class Step:
    def __init__(self, rows: int, bucket: int, variant: int) -> None:
        self.batch_size, self.bucket, self.variant = rows, bucket, variant


def arguments(device: str, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    values = {
        "logits": torch.randn(ROWS, VOCAB, generator=generator) * 3,
        "temperature": torch.rand(ROWS, generator=generator) * 1.5,
        "top_k": torch.randint(0, 60, (ROWS,), generator=generator),
        "top_p": 0.5 + torch.rand(ROWS, generator=generator) / 2,
        "min_p": torch.rand(ROWS, generator=generator) * 0.1,
        "seed": torch.randint(0, 2**62, (ROWS,), generator=generator),
        "position": torch.arange(ROWS),
    }
    values["temperature"][::7] = 0.0
    values["logits"][3, 77] = torch.nan
    values["logits"][5] = -torch.inf
    values["logits"][14, [10, 4000]] = 90.0
    return {name: value.to(device) for name, value in values.items()}


def draw(values: dict[str, Any], mode: SamplerMode) -> torch.Tensor:
    group = TpGroup.single(values["logits"].device)
    rest = {name: value for name, value in values.items() if name != "logits"}
    return sample(values["logits"], vocab_start=0, mode=mode, group=group, **rest)


def test_the_uniform_numbers_are_the_same_bits_on_both_devices() -> None:
    seeds, positions = torch.arange(8) * 2**59, torch.arange(8) * 1000
    cpu = noise.uniform(noise.row_keys(seeds, positions), 49_000, 1_000)
    gpu = noise.uniform(noise.row_keys(seeds.cuda(), positions.cuda()), 49_000, 1_000)
    assert torch.equal(cpu, gpu.cpu())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("mode", list(SamplerMode))
def test_the_device_draws_what_the_cpu_draws(mode: SamplerMode) -> None:
    for seed in range(5):
        on_cpu, on_gpu = arguments("cpu", seed), arguments("cuda", seed)
        expected = draw(on_cpu, mode)
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = draw(on_gpu, mode)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert got.cpu().tolist() == expected.tolist()
        assert expected[3] == expected[5] == INVALID_TOKEN
        assert expected[14] == 10


def test_sampling_can_be_captured() -> None:
    values = arguments("cuda")
    logits = values["logits"].clone()

    def step(inputs: dict[str, torch.Tensor], bucket: int, variant: int) -> torch.Tensor:
        return draw(inputs, SamplerMode(variant))

    with DecodeGraphs(
        step,
        inputs=values,
        buckets=[8, ROWS],
        variants=lambda bucket: len(SamplerMode),
        device=logits.device,
    ) as graphs:
        graphs.capture()
        for seed in range(3):
            fresh = arguments("cuda", seed + 10)
            for name, buffer in values.items():
                buffer.copy_(fresh[name])
            for bucket in (8, ROWS):
                cut = {name: buffer[:bucket] for name, buffer in values.items()}
                for mode in SamplerMode:
                    replayed = graphs.replay(Step(bucket, bucket, mode)).tolist()
                    assert replayed == draw(cut, mode).tolist()
