"""An adapter that peft made is the same function on our server, and can be trained further there.

The server is a real one, with a model of which every number is random.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import tinsmith
from tests.end_to_end.serving import KEY, ServerProcess
from tests.export.making import PROMPT, greedy, load
from tests.server.tiny_models import save_model
from tests.support.tiny_tokenizer import write_folder
from tinsmith.errors import InvalidInputError, UnprocessableEntityError

pytestmark = pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`")

NAME = "tiny/llama"
NUM_TOKENS = 16
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERYTHING = [*ATTENTION, "gate_proj", "up_proj", "down_proj", "lm_head"]

ADAPTERS: dict[str, dict[str, Any]] = {
    "everything": {"r": 8, "lora_alpha": 32, "target_modules": EVERYTHING},
    "two modules": {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "rank stabilised": {"r": 6, "lora_alpha": 10, "use_rslora": True, "target_modules": ["down_proj", "up_proj"]},
    "patterns": {
        "r": 4,
        "lora_alpha": 7,
        "target_modules": EVERYTHING,
        "rank_pattern": {"q_proj": 2, "model.layers.1.mlp.up_proj": 9},
        "alpha_pattern": {"layers.0.self_attn.k_proj": 3, "down_proj": 50},
    },
    "one layer": {"r": 4, "lora_alpha": 8, "target_modules": ["o_proj"], "layers_to_transform": [1]},
    "output only": {"r": 3, "lora_alpha": 64, "target_modules": ["lm_head"]},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(save_model(tmp_path_factory.mktemp("models") / "llama", "llama", vocab_size=430))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Iterator[tinsmith.ServiceClient]:
    with (
        ServerProcess(tmp_path_factory.mktemp("state"), {NAME: base}) as server,
        tinsmith.ServiceClient(base_url=server.url, api_key=KEY) as made,
    ):
        yield made


def make_adapter(base: Path, folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    """Trained, as far as its numbers go: with the usual zeros nothing would show."""
    torch.manual_seed(5)
    model = get_peft_model(load(base), LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
                parameter.data = parameter.data.to(dtype)
    model.save_pretrained(folder)
    return folder


def logprobs_of(base: Path, adapter: Path) -> np.ndarray[Any, Any]:
    """Of each token of the prompt, by peft."""
    model = PeftModel.from_pretrained(load(base), adapter).eval()
    with torch.no_grad():
        scores = model(input_ids=torch.tensor([PROMPT])).logits[0].float().log_softmax(-1)
    return np.array([float(scores[place, token]) for place, token in enumerate(PROMPT[1:])])


def our_logprobs(client: tinsmith.ServiceClient, path: str) -> np.ndarray[Any, Any]:
    sampler = client.create_sampling_client(model_path=path)
    return np.array(sampler.compute_logprobs(tinsmith.types.ModelInput.from_ints(PROMPT)).result()[1:])


def our_words(client: tinsmith.ServiceClient, path: str) -> list[int]:
    params = tinsmith.types.SamplingParams(max_tokens=NUM_TOKENS, temperature=0, stop=[])
    sampler = client.create_sampling_client(model_path=path)
    return list(sampler.sample(tinsmith.types.ModelInput.from_ints(PROMPT), 1, params).result().sequences[0].tokens)


def deltas(folder: Path) -> dict[str, torch.Tensor]:
    """What an adapter of one rank adds to each matrix."""
    weights, config = (
        load_file(folder / "adapter_model.safetensors"),
        json.loads((folder / "adapter_config.json").read_bytes()),
    )
    scale = config["lora_alpha"] / config["r"]
    return {
        name: scale * weights[name.replace("lora_A", "lora_B")].double() @ weights[name].double()
        for name in weights
        if "lora_A" in name
    }


# --- the same function -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_imported_adapter_computes_what_it_computes_in_peft(
    client: tinsmith.ServiceClient, base: Path, tmp_path: Path, kind: str
) -> None:
    adapter = make_adapter(base, tmp_path / "adapter", **ADAPTERS[kind])
    path = client.rest.import_adapter(adapter, NAME).result()
    theirs = logprobs_of(base, adapter)
    np.testing.assert_allclose(our_logprobs(client, path), theirs, atol=1e-4, rtol=0)
    plain = our_logprobs(client, untrained(client))
    assert np.abs(plain - theirs).max() > 0.05, "the adapter changes nothing, so this test would prove nothing"


def untrained(client: tinsmith.ServiceClient) -> str:
    return client.create_lora_training_client(NAME, rank=1).save_weights_for_sampler("plain").result().path


def test_half_precision_is_widened(client: tinsmith.ServiceClient, base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(base, tmp_path / "adapter", torch.bfloat16, **ADAPTERS["two modules"])
    assert {tensor.dtype for tensor in load_file(adapter / "adapter_model.safetensors").values()} == {torch.bfloat16}
    path = client.rest.import_adapter(adapter, NAME).result()
    np.testing.assert_allclose(our_logprobs(client, path), logprobs_of(base, adapter), atol=1e-4, rtol=0)


def test_exported_again_it_is_the_same_function(client: tinsmith.ServiceClient, base: Path, tmp_path: Path) -> None:
    """Matrix by matrix; those that were not there before add nothing."""
    adapter = make_adapter(base, tmp_path / "adapter", **ADAPTERS["two modules"])
    rest = client.rest
    path = rest.import_adapter(adapter, NAME, "from_elsewhere").result()
    assert path.endswith("/weights/from_elsewhere")
    files = rest.export_checkpoint(path, tmp_path / "again").result()
    assert {file.name for file in files} == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    before, after = deltas(adapter), deltas(tmp_path / "again")
    assert len(after) == 2 * len(before)
    for name, added in after.items():
        torch.testing.assert_close(added, before.get(name, torch.zeros_like(added)), rtol=1e-6, atol=1e-7)


def test_all_exports_of_it_say_what_our_sampler_says(
    client: tinsmith.ServiceClient, base: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(base, tmp_path / "adapter", **ADAPTERS["patterns"])
    rest = client.rest
    path = rest.import_adapter(adapter, NAME).result()
    said = our_words(client, path)
    for form in ("peft", "merged", "gguf"):
        rest.export_checkpoint(path, tmp_path / form, form).result()
    assert greedy(PeftModel.from_pretrained(load(base), tmp_path / "peft"), PROMPT, NUM_TOKENS) == said
    assert greedy(load(tmp_path / "merged"), PROMPT, NUM_TOKENS) == said
    (file,) = (tmp_path / "gguf").glob("*.gguf")
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    assert greedy(read, PROMPT, NUM_TOKENS) == said
    assert "tokenizer.ggml.pre" in GGUFReader(file).fields


def test_a_part_of_the_base_that_comes_along_must_be_that_of_our_base(
    client: tinsmith.ServiceClient, base: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(base, tmp_path / "adapter", **ADAPTERS["output only"])
    weights = load_file(adapter / "adapter_model.safetensors")
    copy = "base_model.model.lm_head.base_layer.weight"
    assert copy in weights, "peft no longer saves it, and nobody needs this any more"
    save_file({**weights, copy: weights[copy] + 0.1}, adapter / "adapter_model.safetensors")
    with pytest.raises(UnprocessableEntityError, match="brings lm_head along, and it is not that of the base"):
        client.rest.import_adapter(adapter, NAME).result()


# --- further ---------------------------------------------------------------------------------------------------------


def test_it_is_trained_further_in_all_its_parts(client: tinsmith.ServiceClient, base: Path, tmp_path: Path) -> None:
    """Those that were filled up, too: they begin as those of a new adapter do."""
    adapter = make_adapter(base, tmp_path / "adapter", **ADAPTERS["two modules"])
    rest = client.rest
    path = rest.import_adapter(adapter, NAME).result()
    trainer = client.create_training_client_from_state(path)
    datum = tinsmith.types.Datum(
        model_input=tinsmith.types.ModelInput.from_ints(PROMPT),
        loss_fn_inputs={"target_tokens": [40, 41, 42, 43, 44, 45], "weights": [1.0] * 6},
    )
    losses = []
    for _ in range(4):
        losses.append(trainer.forward_backward([datum], "cross_entropy"))
        trainer.optim_step(tinsmith.types.AdamParams(learning_rate=0.01))
    first, *_, last = (loss.result().metrics["loss:sum"] for loss in losses)
    assert last < first
    saved = trainer.save_state("further").result().path
    rest.export_checkpoint(saved, tmp_path / "further").result()
    before, after = deltas(adapter), deltas(tmp_path / "further")
    for name, added in after.items():
        assert not torch.allclose(added, before.get(name, torch.zeros_like(added)), atol=1e-4), f"{name} stayed"
    assert "| optimizer steps | 4 |" in (tmp_path / "further" / "README.md").read_text()


# --- mistakes --------------------------------------------------------------------------------------------------------


def test_mistakes_are_told_where_they_are_made(client: tinsmith.ServiceClient, base: Path, tmp_path: Path) -> None:
    rest = client.rest
    with pytest.raises(InvalidInputError, match=r"lacks adapter_config.json and adapter_model.safetensors"):
        rest.import_adapter(tmp_path, NAME)
    adapter = make_adapter(base, tmp_path / "dora", r=4, use_dora=True, target_modules=["q_proj"])
    with pytest.raises(UnprocessableEntityError, match="uses use_dora"):
        rest.import_adapter(adapter, NAME).result()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    shutil.rmtree(adapter)
    plain = make_adapter(base, tmp_path / "plain", **ADAPTERS["output only"])
    path = rest.import_adapter(plain, NAME).result()
    with pytest.raises(InvalidInputError, match="exists and is not empty"):
        rest.export_checkpoint(path, tmp_path / "taken").result()
    with pytest.raises(UnprocessableEntityError, match="4,001 characters"):
        rest.export_checkpoint(path, tmp_path / "new", data_note="x" * 4001).result()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["plain", "taken"], "something was left behind"
