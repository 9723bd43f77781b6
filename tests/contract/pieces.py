# SPDX-License-Identifier: Apache-2.0
"""The plug-in's parts on small models, with the real torch and without a start of vLLM.

docker run --rm ... -e PYTHONPATH=/tests --entrypoint python warmhold:cpu /tests/contract/pieces.py

What concerns memory is checked twice: in a CPU's, and in that of a GPU whose driver is a fake over
memfds, so that its addresses are a CPU's too.
"""

import hashlib
import json
import os
import random
import struct
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
from fake_cuda import build_fake_cuda
from stand import Vault
from torch import nn
from warmhold_wcache import segments
from warmhold_wcache.client import VaultClient
from warmhold_wcache.cuda_driver import Driver
from warmhold_wcache.cuda_segments import CudaSegments
from warmhold_wcache.errors import WcacheError
from warmhold_wcache.generation import Generation, Segment, Tensor
from warmhold_wcache.vllm_plugin import (
    exact_key,
    model_state,
    residency,
    tensor_checksum,
    wanted,
    worker_methods,
)
from warmhold_wcache.vllm_plugin.cpu_linear import CpuLinear, select_cpu_linear
from warmhold_wcache.vllm_plugin.cuda_memory import CudaMemory
from warmhold_wcache.vllm_plugin.host_memory import HostMemory
from warmhold_wcache.vllm_plugin.memory import Memory, find_memory
from warmhold_wcache.vllm_plugin.model_state import StructureError
from warmhold_wcache.vllm_plugin.options import Options, Source
from warmhold_wcache.vllm_plugin.sparse import PAGE_BYTES, TAG, SparseCopies

MIB = 1 << 20


class FakeGpu(CudaMemory):
    """A GPU's memory without torch's view of it, which needs the device."""

    device = "cuda:fake"
    view = HostMemory.view
    loading = HostMemory.loading

    def __init__(self, library: Path) -> None:
        CudaSegments.__init__(self, 0, Driver(str(library)))

    def trim(self) -> None:
        """Nothing is kept."""


memory: Memory = find_memory(torch.device("cpu"))


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
    sizes, places = residency.build_layout(memory, inventory, segment_bytes)
    made, fds = residency.move_into_segments(memory, inventory, sizes, places, "weights")
    attributes = {"plain": list(inventory.plain), "scalars": {"": {"flag": True}}}
    generation = Generation(
        *({"a": "b"}, {}, memory.backend, memory.device, "m", made, tuple(places)),
        *(inventory.aliases, attributes),
    )
    assert Generation.from_json(json.loads(json.dumps(generation.to_json()))) == generation
    return generation, fds


def built(generation: Generation, fds: list[int], copy: bool = False) -> Small:
    addresses = residency.map_generation(memory, generation, fds)
    with torch.device("meta"):
        model = Small()
    plain = frozenset(generation.attributes["plain"])
    tensors = residency.read_tensors(memory, generation, addresses, copy)
    model_state.set_tensors(model, tensors, generation.aliases, plain)
    model_state.set_scalars(model, generation.attributes["scalars"])
    if copy:
        residency.unmap(memory, generation, addresses)
    else:
        kept = residency.Residency(memory, generation, addresses, Path("/none"), 1.0)
        residency.keep(kept, model)
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
    private = "rw-p" if memory.backend == "memfd" else "rw-s"  # of an allocation of its own
    assert rights_at(first.embed.weight.data_ptr()) == private
    assert torch.equal(built(generation, fds).embed.weight, old)


def check_moved_to_the_pool() -> None:
    model = filled()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    place = model.embed.weight.data_ptr()
    residency.move_to_pool(memory, model_state.read_inventory(model))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.turned.weight.stride() == (1, 8)
    assert model.head.weight is model.embed.weight
    assert model.twin.weight.data_ptr() == model.embed.weight.data_ptr() != place


def check_a_wake_up_writes_into_no_segment() -> None:
    model = filled()
    model.register_buffer("table", torch.ones(MIB))
    generation, fds = published(model)
    addresses = [segment.address for segment in generation.segments]
    kept = residency.Residency(memory, generation, addresses, Path("/none"), 1.0)
    residency.keep(kept, model)
    parameters = dict(model.named_parameters())
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(model=model),
        get_draft_model=lambda: model,
        _get_sleep_parameters=lambda _: parameters,
        _sleep_saved_buffers={"table": 1, "scale": 2},
        _sleep_saved_draft_buffers={"table": 1},
        _sleep_saved_parameters={"turned.weight": 1},
    )
    for act in (lambda: None, kept.quiesce):
        act()
        worker_methods._forget_shared(worker)
        assert worker._sleep_saved_buffers == {"scale": 2}
        assert not worker._sleep_saved_draft_buffers and not worker._sleep_saved_parameters
        worker._sleep_saved_buffers["table"] = 1
    residency.close_all(fds)


def check_layout() -> None:
    model = nn.ModuleList([nn.Linear(512, 512, bias=False) for _ in range(8)])  # 1 MiB each
    model.append(nn.Linear(1024, 2048, bias=False))  # 8 MiB
    inventory = model_state.read_inventory(model)
    sizes, places = residency.build_layout(memory, inventory, 2 * MIB)
    assert sizes == [2 * MIB] * 4 + [8 * MIB]
    assert [place.segment for place in places] == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    many = nn.ModuleList([nn.Linear(64, 64) for _ in range(1000)])
    sizes, places = residency.build_layout(memory, model_state.read_inventory(many), 1)
    assert len(sizes) <= residency.MAX_SEGMENTS + 1
    assert all(size % memory.granularity_bytes == 0 for size in sizes)
    assert all(place.offset_bytes % memory.alignment_bytes == 0 for place in places)


def check_layout_of_a_large_model() -> None:
    """Llama 70B: 141 GB in fewer than 1,000 descriptors, and little that is not weights."""
    hidden, inner, heads = 8192, 28672, 1024
    with torch.device("meta"):
        layers = [
            [(hidden + 2 * heads, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]
            for _ in range(80)
        ]
        shapes = [(128256, hidden), *(shape for layer in layers for shape in layer)]
        shapes += [(128256, hidden)]
        model = nn.ParameterList(
            [nn.Parameter(torch.empty(shape, dtype=torch.bfloat16)) for shape in shapes]
        )
    inventory = model_state.read_inventory(model)
    sizes, _ = residency.build_layout(memory, inventory, 128 * MIB)
    weights = sum(item.tensor.nbytes for item in inventory.tensors)
    print(f"     {weights / 1e9:.1f} GB in {len(sizes)} segments", flush=True)
    assert weights > 140e9 and len(sizes) < 1000
    assert sum(sizes) < 1.01 * weights


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
    is_private = residency.is_private

    class Noting(HostMemory):
        def allocate(self, size_bytes: int, name: str) -> tuple[int, int]:
            fd, address = super().allocate(size_bytes, name)
            made.append(fd)
            return fd, address

    def sample(*arguments: object) -> bool:
        nonlocal peak
        peak = max(peak, held())
        return is_private(*arguments)

    residency.is_private = sample
    inventory = model_state.read_inventory(model)
    noting = Noting()
    try:
        sizes, places = residency.build_layout(noting, inventory, 128 * MIB)
        residency.move_into_segments(noting, inventory, sizes, places, "weights")
    finally:
        residency.is_private = is_private
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

    client, residency.VaultClient = residency.VaultClient, Vault
    try:
        kept.quiesce()  # again is fine
        kept.resume()
        assert rights_at(address) == "r--s"
        assert torch.equal(model.embed.weight, before)
        kept.quiesce()
        sound, generation = generation, published(nn.Linear(8, 8))[0]
        try:
            kept.resume()
        except WcacheError as error:
            assert "another layout" in str(error)
        else:
            raise AssertionError("other weights were mapped")
        generation = sound
        kept.resume()
    finally:
        residency.VaultClient = client


def check_what_the_vault_lacks_stays_mapped() -> None:
    model = built(*published(filled()))  # at its socket there is no vault at all
    worker = SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=False),
        model_runner=SimpleNamespace(kv_caches=[]),
    )
    answer = worker_methods._quiesce(worker)
    assert answer["error"]["code"] == "wcache.absent", answer
    assert rights_at(model.embed.weight.data_ptr()) == "r--s"


def check_what_is_mostly_zeros_sleeps_without_them() -> None:
    size = 2 * MIB  # a segment's least
    count = size // PAGE_BYTES
    used = {
        "zeros": [],
        "few": [0, 8 * PAGE_BYTES - 1, size - 1],  # the first byte, one page's last, the very last
        "half": [at * PAGE_BYTES + at % 8 for at in range(0, count, 2)],
        "most": [at * PAGE_BYTES for at in range(count // 2 + 1)],
    }
    pool = {}
    for name, places in used.items():
        _, address = memory.allocate(size, name)
        memory.view(address, size)[places] = 1
        pool[address] = SimpleNamespace(tag="runtime", is_asleep=False, handle=(0, size), name=name)
    _, other = memory.allocate(size, "other")  # not to be copied at all
    pool[other] = SimpleNamespace(tag="kv_cache", is_asleep=False, handle=(0, size), name="other")
    odd = -1  # never looked at
    pool[odd] = SimpleNamespace(tag="runtime", is_asleep=False, handle=(0, size + 8), name="odd")
    before = {address: memory.view(address, size).clone() for address in pool if address != odd}
    copies = SparseCopies(memory.view)

    copies.keep(pool, ("weights", "runtime"))
    tags = {data.name: data.tag for data in pool.values()}
    kept = dict.fromkeys(("zeros", "few", "half"), TAG)
    assert tags == {**kept, "most": "runtime", "other": "kv_cache", "odd": "runtime"}, tags
    assert pool.pop(odd).tag == "runtime"
    for address, data in pool.items():
        data.is_asleep = True
        if data.tag == TAG:  # vLLM discards it, and later maps what nobody has written
            memory.view(address, size)[:] = 0xAA
    copies.keep(pool, ("weights", "runtime"))  # asleep already
    copies.put_back(pool)  # nothing is there yet
    addresses = {data.name: address for address, data in pool.items()}
    gone = pool.pop(addresses["few"])
    pool[addresses["few"]] = SimpleNamespace(tag="weights", is_asleep=False, handle=(0, size))
    for data in pool.values():
        data.is_asleep = False
    copies.put_back(pool)
    for name in ("zeros", "half", "most", "other"):
        data = pool[addresses[name]]
        assert data.tag == ("kv_cache" if name == "other" else "runtime")
        assert torch.equal(memory.view(addresses[name], size), before[addresses[name]]), name
    assert gone.tag == TAG and (memory.view(addresses["few"], size) == 0xAA).all(), "another's"
    memory.view(addresses["zeros"], size)[:] = 1
    copies.put_back(pool)  # once is enough
    assert (memory.view(addresses["zeros"], size) == 1).all()


def check_a_key_does_not_depend_on_the_order_of_a_set() -> None:
    for names in ({"b", "c", "a"}, frozenset(("c", "b", "a"))):
        assert exact_key._stable(names) == '["a", "b", "c"]'


def check_no_memory() -> None:
    """Where the second segment does not fit, the model goes on, in part from the first."""

    class Full(type(memory)):
        def __init__(self) -> None:
            self.left = 1

        def allocate(self, size_bytes: int, name: str) -> tuple[int, int]:
            self.left -= 1
            if self.left < 0:
                raise OSError("no memory")
            return memory.allocate(size_bytes, name)

        def __getattr__(self, name: str) -> object:
            return getattr(memory, name)

    model = nn.ModuleList([nn.Linear(512, 512, bias=False) for _ in range(4)])
    before = [layer.weight.clone() for layer in model]
    inventory = model_state.read_inventory(model)
    sizes, places = residency.build_layout(memory, inventory, 2 * MIB)
    open_before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    try:
        residency.move_into_segments(Full(), inventory, sizes, places, "weights")
    except OSError:
        pass
    else:
        raise AssertionError(sizes)
    assert len(os.listdir("/proc/self/fd")) == open_before  # noqa: PTH208
    assert all(torch.equal(a, b.weight) for a, b in zip(before, model, strict=True))
    for layer in model:
        layer.weight.fill_(1.0)  # loading other weights would


def check_checksum() -> None:
    """Equal to the definition in plain integers, on whichever chunks it is computed."""
    source = random.Random(1)  # noqa: S311 - no secret
    data = bytearray(source.randbytes(8 * 1000))

    def tensor() -> torch.Tensor:
        return torch.frombuffer(data, dtype=torch.uint8)

    right = plain_checksum(bytes(data))
    whole, tensor_checksum._CHUNK_WORDS = tensor_checksum._CHUNK_WORDS, 7
    try:
        assert tensor_checksum.compute_checksum(tensor()) == right
    finally:
        tensor_checksum._CHUNK_WORDS = whole
    assert tensor_checksum.compute_checksum(tensor()) == right
    seen = {right}
    for bit in (0, 63, 64 * 500 + 63, 64 * 1000 - 1):
        data[bit // 8] ^= 1 << bit % 8
        seen.add(tensor_checksum.compute_checksum(tensor()))
        data[bit // 8] ^= 1 << bit % 8
    data[:8], data[8:16] = data[8:16], data[:8]  # two words change places
    seen.add(tensor_checksum.compute_checksum(tensor()))
    data[8:16] = data[:8]
    data[15] ^= 128  # words that differ in the highest bit alone, which the linear sum cannot see
    seen.add(tensor_checksum.compute_checksum(tensor()))
    data[7], data[15] = data[15], data[7]
    seen.add(tensor_checksum.compute_checksum(tensor()))
    assert len(seen) == 8
    zeros = [torch.zeros(8 * n, dtype=torch.uint8) for n in (1, 2, 1000)]
    assert len({tensor_checksum.compute_checksum(item) for item in zeros}) == 3


def plain_checksum(data: bytes) -> str:
    modulus = 1 << 64
    linear = mixed = 0
    for number, (word,) in enumerate(struct.iter_unpack("<Q", data)):
        odd = 2 * number + 1
        linear += word * odd
        x = (word + odd * 0x9E3779B97F4A7C15) % modulus
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % modulus
        x = (x ^ x >> 27) * 0x94D049BB133111EB % modulus
        mixed += x ^ x >> 31
    sums = struct.pack("<QQQ", linear % modulus, mixed % modulus, len(data))
    return hashlib.blake2b(sums, digest_size=16).hexdigest()


def check_foreign_backend() -> None:
    generation, fds = published(filled())
    other = FakeGpu.backend if memory.backend == "memfd" else HostMemory.backend
    object.__setattr__(generation, "backend", other)
    try:
        residency.map_generation(memory, generation, fds)
    except WcacheError as error:
        assert other in str(error)
    else:
        raise AssertionError(other)


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


MINE = {"device": "cuda:fake", "content": "now", "name": "mine"}


class Loading:
    """A loader on a GPU of some bytes, just before vLLM measures it, with a real vault; its own
    weights are `mine`."""

    def __init__(self, gpu_bytes: int) -> None:
        self.vault, self.gpu_bytes = Vault(), gpu_bytes
        self.patches = {
            (wanted, "find_wanted"): lambda *_: wanted.Wanted(
                SimpleNamespace(device="cuda:fake"),
                MINE,
                SimpleNamespace(digest="now"),
                Path("/m"),
            ),
            (torch.cuda, "mem_get_info"): lambda _: (gpu_bytes - self.held(), gpu_bytes),
        }

    def held(self) -> int:
        with VaultClient(self.vault.socket) as client:
            return sum(row["bytes"] for row in client.stat())

    def publish(self, **key: str) -> str:
        """Publish a page; return its id. It is held until it is released."""
        fd = segments.create(PAGE_BYTES, "w")
        generation = Generation(
            *({**MINE, **key}, {}, "memfd", "cpu", "m"),
            (Segment(PAGE_BYTES, 0, segments.checksum(fd, PAGE_BYTES)),),
            (Tensor("w", "parameter", 0, 0, (PAGE_BYTES,), (1,), "uint8"),),
            *({}, {}),
        )
        with VaultClient(self.vault.socket) as client:
            client.publish(generation, [fd])
        os.close(fd)
        return generation.id

    def release(self, *ids: str) -> None:
        with VaultClient(self.vault.socket) as client:
            for generation_id in ids:
                client.release(generation_id)

    def load(self, share: float, kv_bytes: int | None = None, **options: object) -> int:
        """Return what the loader says that it will map."""
        config = SimpleNamespace(
            speculative_config=None,
            model_config=SimpleNamespace(model="m"),
            cache_config=SimpleNamespace(
                gpu_memory_utilization=share, kv_cache_memory_bytes=kv_bytes
            ),
        )
        given = Options(socket_path=self.vault.socket, **options)
        kept = {place: getattr(*place) for place in self.patches}
        try:
            for (module, name), patch in self.patches.items():
                setattr(module, name, patch)
            return wanted.read_external_bytes(config, torch.device("cuda"), given, None)
        finally:
            for (module, name), old in kept.items():
                setattr(module, name, old)

    def left(self) -> list[str]:
        with VaultClient(self.vault.socket) as client:
            return sorted(row["key"]["name"] + row["key"]["content"] for row in client.stat())


def check_a_loader_makes_room_before_vllm_measures() -> None:
    loading = Loading(10 * PAGE_BYTES)
    try:
        assert loading.load(0.9) == 0
        then, mine = loading.publish(content="then"), loading.publish()
        other = loading.publish(name="other")
        for source in Source.IPC_CACHE, Source.AUTO:
            assert loading.load(0.9, source=source) == PAGE_BYTES
            assert loading.left() == ["minenow", "minethen", "othernow"]
        loading.release(then, mine, other)
        assert loading.load(0.7, source=Source.IPC_CACHE) == PAGE_BYTES
        assert loading.left() == ["minenow", "minethen", "othernow"]
        # Of 10 pages it asks for 9, maps 1, and 8 are free once an earlier checkpoint has gone.
        assert loading.load(0.9) == PAGE_BYTES
        assert loading.left() == ["minenow", "othernow"]
        assert loading.load(0.05, kv_bytes=1) == PAGE_BYTES // 2 - 1
        # It asks for all 10: the other's page is missing.
        assert loading.load(1.0, source=Source.IPC_CACHE) == PAGE_BYTES
        assert loading.left() == ["minenow"]
        # As would its own be, where it does not map it.
        assert loading.load(0.9, source=Source.DISK) == 0
        assert loading.left() == ["minenow"]
        assert loading.load(1.0, source=Source.DISK) == 0
        assert loading.left() == []
    finally:
        loading.vault.stop()


# What does not depend on the memory, or is a CPU's own.
ONCE = {
    *("check_checksum", "check_extra_memory", "check_linear", "check_misfits"),
    "check_a_key_does_not_depend_on_the_order_of_a_set",
    "check_a_loader_makes_room_before_vllm_measures",
}


def main() -> int:
    global memory
    chosen = sys.argv[1:]
    failed = 0
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        host, gpu = memory, FakeGpu(build_fake_cuda(Path(folder)))
        for memory in (host, gpu):
            for name, act in sorted(globals().items()):
                once = name in ONCE and memory is not host
                if not name.startswith("check_") or once or (chosen and name not in chosen):
                    continue
                residency.RESIDENT.clear()
                residency.DETACHED.clear()
                try:
                    act()
                except Exception:
                    traceback.print_exc()
                    failed += 1
                    print("FAIL", memory.backend, name, flush=True)
                else:
                    print("ok  ", memory.backend, name, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
