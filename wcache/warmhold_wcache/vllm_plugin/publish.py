# SPDX-License-Identifier: Apache-2.0
"""A miss, after the load from disk: the model moves into segments, and the vault gets them.

Without a vault nothing is moved. A vault that fails afterwards leaves a model that serves from
segments of its own.
"""

from contextlib import suppress
from typing import Any

from torch import nn

from warmhold_wcache.client import VaultClient
from warmhold_wcache.errors import WcacheError
from warmhold_wcache.generation import Generation, key_id
from warmhold_wcache.vllm_plugin import model_state, residency
from warmhold_wcache.vllm_plugin.cpu_linear import list_packed
from warmhold_wcache.vllm_plugin.options import Options
from warmhold_wcache.vllm_plugin.outcome import Outcome
from warmhold_wcache.vllm_plugin.wanted import Wanted


def publish(
    model: nn.Module,
    model_config: Any,
    wanted: Wanted,
    scalars: dict[str, dict[str, Any]],
    options: Options,
    outcome: Outcome,
) -> None:
    """Given a loaded model, what it is published as and the plain values that loading set, publish
    it; what happened, and why nothing did, is in the outcome."""
    memory, key = wanted.memory, wanted.key
    try:
        with VaultClient(options.socket_path, options.connect_timeout_s) as client:
            resident = any(entry["key"] == key for entry in client.stat())
    except (WcacheError, OSError) as error:
        outcome.not_published(str(error), warn=True)
        return
    if resident:
        outcome.generation = key_id(key)
        outcome.not_published("these weights are in the vault already")
        return
    _retie(model, model_config)
    inventory = model_state.read_inventory(model)
    sizes, places = residency.build_layout(memory, inventory, options.segment_bytes)
    try:
        with outcome.phase("move"):
            made, fds = residency.move_into_segments(memory, inventory, sizes, places, "weights")
    except (WcacheError, OSError) as error:
        outcome.not_published(str(error), warn=True)
        return
    generation = Generation(
        key=key,
        launch_key=dict(options.launch_key),
        backend=memory.backend,
        device=memory.device,
        model=str(model_config.model),
        segments=made,
        tensors=tuple(places),
        aliases=inventory.aliases,
        attributes={
            "plain": list(inventory.plain),
            "scalars": scalars,
            "packed": list_packed(model),
        },
    )
    try:
        with (
            outcome.phase("publish"),
            VaultClient(options.socket_path, options.connect_timeout_s) as client,
        ):
            client.publish(generation, fds)
    except (WcacheError, OSError) as error:
        outcome.not_published(str(error), warn=True)
    else:
        outcome.published = generation.id
    finally:
        residency.close_all(fds)
    addresses = [segment.address for segment in made]
    kept = residency.Residency(
        *(memory, generation, addresses), *(options.socket_path, options.connect_timeout_s)
    )
    residency.keep(kept, model)


def _retie(model: nn.Module, model_config: Any) -> None:
    """Let an output head that equals the embedding share its memory before it is stored twice;
    vLLM does so in post-processing, from 0.32 on."""
    with suppress(ImportError, AttributeError):
        from vllm.model_executor.model_loader.weight_tying import maybe_retie_word_embeddings

        maybe_retie_word_embeddings(model, model_config)
