# SPDX-License-Identifier: Apache-2.0
"""The plug-in's parts on small models, with the real torch and without a start of vLLM.

docker run --rm ... --entrypoint python warmhold:cpu tests/contract/pieces.py
"""

import json
import os
import sys
import traceback
from pathlib import Path

import torch
from torch import nn
from warmhold_wcache.generation import Generation
from warmhold_wcache.vllm_plugin import model_state, residency
from warmhold_wcache.vllm_plugin.cpu_linear import CpuLinear, select_cpu_linear
from warmhold_wcache.vllm_plugin.model_state import StructureError

MIB = 1 << 20


class Small(nn.Module):
    """Tied, transposed, shared through another object, buffers, and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight
        self.twin = nn.Linear(32, 64, bias=False)
        self.turned = nn.Linear(16, 8)
        self.empty = nn.Parameter(torch.empty(0))
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.plain = torch.arange(6.0)
        self.flag = False
        self.embed.weight.weight_loader = len

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        self.load_state_dict(weights, strict=False)


def filled() -> Small:
    model = Small()
    model.turned.weight.data = torch.randn(16, 8).t()
    model.twin.weight.data = model.embed.weight.data
    model.flag = True
    return model


def published(model: nn.Module, segment_bytes: int = MIB) -> tuple[Generation, list[int]]:
    inventory = model_state.read_inventory(model)
    sizes, places = residency.build_layout(inventory, segment_bytes)
    made, fds = residency.move_into_segments(inventory, sizes, places, "weights")
    attributes = {"plain": list(inventory.plain), "scalars": {"": {"flag": True}}}
    generation = Generation(
        {"a": "b"}, {}, "memfd", "cpu", "m", made, tuple(places), inventory.aliases, attributes
    )
    assert Generation.from_json(json.loads(json.dumps(generation.to_json()))) == generation
    return generation, fds


def built(generation: Generation, fds: list[int], copy: bool = False) -> Small:
    addresses = residency.map_generation(generation, fds)
    with torch.device("meta"):
        model = Small()
    plain = frozenset(generation.attributes["plain"])
    tensors = residency.read_tensors(generation, addresses, copy)
    model_state.set_tensors(model, tensors, generation.aliases, plain)
    model_state.set_scalars(model, generation.attributes["scalars"])
    if copy:
        residency.unmap(generation, addresses)
    else:
        residency.keep(residency.Residency(generation, addresses, Path("/none"), 1.0), model)
    return model


def rights_at(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        if low <= address < high:
            return line.split()[1]
    return ""


def check_round_trip() -> None:
    model = filled()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generation, fds = published(model)
    for made in (model, built(generation, fds), built(generation, fds, copy=True)):
        after = made.state_dict()
        assert before.keys() == after.keys()
        for name, value in before.items():
            assert torch.equal(value, after[name]), name
        assert made.head.weight is made.embed.weight
        assert made.turned.weight.stride() == (1, 8)
        assert made.scale.item() == 2.0 and made.flag is True
        assert made.plain.tolist() == [0, 1, 2, 3, 4, 5]
        assert made.embed.weight.weight_loader is len
        assert isinstance(made.embed.weight, nn.Parameter)
        assert not model_state.find_meta(made)
        assert made.twin.weight.data_ptr() == made.embed.weight.data_ptr()


def check_rights() -> None:
    model = filled()
    generation, fds = published(model)
    for made in (model, built(generation, fds)):
        assert rights_at(made.embed.weight.data_ptr()) == "r--s"
        made.scale.fill_(3.0)  # post-processing does so: small buffers are private
    assert built(generation, fds).scale.item() == 2.0


def check_detach() -> None:
    generation, fds = published(filled())
    first, second = built(generation, fds), built(generation, fds)
    old = second.embed.weight.clone()
    first.load_weights({"embed.weight": torch.ones(64, 32)})
    assert first.embed.weight.sum() == 64 * 32
    assert first.head.weight is first.embed.weight
    assert torch.equal(second.embed.weight, old)
    assert residency.DETACHED and not residency.RESIDENT
    assert rights_at(first.embed.weight.data_ptr()) == "rw-p"
    assert torch.equal(built(generation, fds).embed.weight, old)


def check_layout() -> None:
    model = nn.ModuleList([nn.Linear(512, 512, bias=False) for _ in range(8)])  # 1 MiB each
    model.append(nn.Linear(1024, 2048, bias=False))  # 8 MiB
    inventory = model_state.read_inventory(model)
    sizes, places = residency.build_layout(inventory, 2 * MIB)
    assert sizes == [2 * MIB] * 4 + [8 * MIB]
    assert [place.segment for place in places] == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert all(place.offset_bytes % residency.ALIGNMENT_BYTES == 0 for place in places)
    many = nn.ModuleList([nn.Linear(64, 64) for _ in range(1000)])
    sizes, _ = residency.build_layout(model_state.read_inventory(many), 1)
    assert len(sizes) <= residency.MAX_SEGMENTS + 1


def check_extra_memory() -> None:
    # Sampled after each copy, before its original is freed: private memory and the pages of memfds.
    made: list[int] = []

    def held() -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        private = next(line for line in status if line.startswith("RssAnon"))
        return int(private.split()[1]) * 1024 + sum(os.fstat(fd).st_blocks * 512 for fd in made)

    model = nn.ModuleList([nn.Linear(4096, 4096, bias=False) for _ in range(8)])  # 64 MiB each
    before = held()
    peak = before
    create, is_private = residency.segments.create, residency.is_private

    def note(size: int, name: str) -> int:
        made.append(create(size, name))
        return made[-1]

    def sample(*arguments: object) -> bool:
        nonlocal peak
        peak = max(peak, held())
        return is_private(*arguments)

    residency.segments.create, residency.is_private = note, sample
    try:
        published(model, 128 * MIB)
    finally:
        residency.segments.create, residency.is_private = create, is_private
    extra, left = (peak - before) / MIB, (held() - before) / MIB
    print(f"     extra MiB at the peak {extra:.1f}, afterwards {left:.1f}", flush=True)
    assert 60 <= extra <= 128 + 8
    assert left <= 8
    residency.close_all(made)


def check_misfits() -> None:
    with torch.device("meta"):
        shapes = model_state.read_shapes(Small())
    stored = dict(shapes)
    model_state.check_shapes(shapes, stored)
    for wrong in (
        {k: v for k, v in stored.items() if k != "turned.bias"},
        {**stored, "more": ((1,), "float32")},
        {**stored, "turned.bias": ((9,), "float32")},
        {**stored, "turned.bias": ((8,), "bfloat16")},
    ):
        try:
            model_state.check_shapes(shapes, wrong)
        except StructureError as error:
            assert "turned.bias" in str(error) or "more" in str(error)
        else:
            raise AssertionError(wrong)
    with torch.device("meta"):
        model = Small()
        model.hidden = {"deep": [torch.zeros(1)]}
    assert "hidden" in model_state.find_meta(model)


def check_quiesce() -> None:
    generation, fds = published(filled())
    model = built(generation, fds)
    kept = residency.RESIDENT[-1]
    before = model.embed.weight.clone()
    address = model.embed.weight.data_ptr()
    kept.quiesce()
    assert rights_at(address) == "---p"

    class Vault:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> "Vault":
            return self

        def __exit__(self, *_: object) -> None: ...
        def fetch(self, key: dict[str, str]) -> tuple[Generation, list[int]]:
            return generation, [os.dup(fd) for fd in fds]

    residency.VaultClient = Vault
    kept.resume()
    assert rights_at(address) == "r--s"
    assert torch.equal(model.embed.weight, before)


def check_linear() -> None:
    from vllm.model_executor.layers import utils

    original = utils.dispatch_cpu_unquantized_gemm
    for path in (CpuLinear.SHARED, CpuLinear.PACKED):
        layer = nn.Linear(256, 512, bias=False, dtype=torch.bfloat16)
        x = torch.randn(3, 256).bfloat16()
        right = torch.nn.functional.linear(x, layer.weight)
        select_cpu_linear(path)
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        assert (layer.weight.numel() > 0) == (path is CpuLinear.SHARED)
        close = (layer.cpu_linear(x, layer.weight, None) - right).abs().max()
        assert close < 0.02, close
    assert utils.dispatch_cpu_unquantized_gemm is original


def main() -> int:
    failed = 0
    with torch.no_grad():
        for name, act in sorted(globals().items()):
            if name.startswith("check_"):
                try:
                    act()
                except Exception:
                    traceback.print_exc()
                    failed += 1
                    print("FAIL", name, flush=True)
                else:
                    print("ok  ", name, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
