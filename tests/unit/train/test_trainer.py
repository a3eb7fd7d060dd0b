"""What the trainer does otherwise than the library, method by method, on a real model in one process."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from bitsandbytes.optim import GlobalOptimManager
from transformers import AutoModelForCausalLM
from trl import SFTConfig

from benchmarks.small_models import WIDE, small_config
from sft_play.choices.optimizers import EIGHT_BIT_FROM
from sft_play.errors import NonFiniteError
from sft_play.manifest import read_manifest
from sft_play.model.layers.loss_head import TokenScore, score_batch
from sft_play.parts import IGNORED
from sft_play.train.session import Arguments, prepare_session
from sft_play.train.trainer import HALVINGS, PlannedTrainer, averaged, forget_embeddings
from tests.conftest import VOCABULARY
from tests.jobs import make_job
from tests.rounding import assert_same_values
from tests.unit.test_manifest import flip_bit

NEAR = 1e-5


@pytest.fixture
def trainer_of(tiny_model, tmp_path):
    """`trainer_of(**settings)`: the trainer of a run of this model, before its first step."""

    def make(**settings) -> PlannedTrainer:
        settings = {"mode": "full", "batch_size": 4, **settings}
        return prepare_session(make_job(tiny_model, tmp_path, "one", **settings), announce=False).trainer

    return make


def first_step(trainer: PlannedTrainer) -> list[dict]:
    """The micro-batches of the first step."""
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    count = trainer.args.gradient_accumulation_steps
    return [trainer.data_collator([trainer.train_dataset[place]]) for place in range(count)]


def supervised(batches: list[dict]) -> torch.Tensor:
    """How many tokens of these batches carry loss."""
    return sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)


def break_weight(trainer: PlannedTrainer) -> None:
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(math.nan)


@pytest.mark.parametrize("settings", [{"mode": "lora"}, {"mode": "full", "weight_decay": 0.1}])
def test_steps_look_through_no_modules_for_what_is_trained_and_are_those_of_the_library(
    trainer_of, settings, monkeypatch
):
    """A GPU would wait meanwhile; an evaluation or a checkpoint may take the time."""
    trained, walks, steps = [], [], []
    walk = torch.nn.Module._named_members  # beneath parameters(), and the library's zero_grad()

    def counted(*args, **kwargs):
        walks.append(len(steps))
        return walk(*args, **kwargs)

    for own in (True, False):
        trainer = trainer_of(max_steps=6, eval_steps=6, save_steps=6, **settings)
        if not own:
            for name in ("_run_epoch", "_clip_grad_norm"):
                monkeypatch.delattr(PlannedTrainer, name)
        model, optimizer = trainer.model, trainer.create_optimizer()
        optimizer.register_step_post_hook(lambda *_: steps.append(None))
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.Module, "_named_members", counted)
            trainer.train()
        assert "zero_grad" not in vars(model)  # as it was before
        trained.append([weight.detach().clone() for weight in model.parameters()])
        between = [count for count in walks if 1 <= count <= 5]
        assert bool(between) != own
        walks.clear()
        steps.clear()
    assert all(map(torch.equal, *trained))


def test_a_process_that_sees_two_gpus_trains_on_one(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)  # which a CUDA build would do
    for kind, count in ((SFTConfig, 2), (Arguments, 1)):  # TRL refuses two
        args = kind(output_dir=str(tmp_path), bf16=False, per_device_train_batch_size=3)
        assert (args.n_gpu, args.train_batch_size) == (count, 3 * count)


def test_the_shares_of_micro_batches_add_up_to_the_mean_loss_of_the_step(trainer_of):
    trainer = trainer_of()
    batches = first_step(trainer)
    assert len(batches) == 4
    tokens = supervised(batches)
    score = TokenScore.of(sum(score_batch(trainer.model, batch) for batch in batches))
    shares = [trainer.training_step(trainer.model, batch, tokens) for batch in batches]
    assert score.tokens == int(tokens)
    assert_same_values([float(sum(shares))], [score.loss], NEAR)
    assert all(weight.grad is not None for weight in trainer.model.parameters())


def test_training_mode_is_set_again_after_an_evaluation(trainer_of):
    trainer = trainer_of()
    trainer.model.eval()
    batches = first_step(trainer)
    trainer.training_step(trainer.model, batches[0], supervised(batches))
    assert all(module.training for module in trainer.model.modules())


def test_a_loss_that_is_nan_adds_nothing_to_the_log_and_all_ranks_see_it_in_the_gradients(trainer_of):
    trainer = trainer_of()
    batches = first_step(trainer)
    break_weight(trainer)
    assert float(trainer.training_step(trainer.model, batches[0], supervised(batches))) == 0
    assert all(weight.grad.isnan().all() for weight in trainer.model.parameters() if weight.dim() == 1)


def test_a_step_without_a_finite_norm_is_taken_out_of_the_log_and_several_end_the_run(trainer_of, capsys):
    trainer = trainer_of(max_skipped_steps=2)
    batches = first_step(trainer)
    for expected in (1, 2):
        shares = [trainer.training_step(trainer.model, batch, supervised(batches)) for batch in batches]
        trainer._tr_loss = 1 + sum(shares)
        if expected == 2:
            with pytest.raises(NonFiniteError, match="step 1 was skipped: .*2 in a row; 2 end the run"):
                trainer._get_grad_norm(trainer.model, grad_norm=math.inf)
            break
        trainer._get_grad_norm(trainer.model, grad_norm=math.inf)
        assert_same_values([float(trainer._tr_loss)], [1.0], NEAR)
        assert all(weight.grad is None for weight in trainer.model.parameters())
        assert "each of its rows has a finite loss on its own" in " ".join(capsys.readouterr().out.split())
    assert trainer.skipped.total == 2


def test_a_finite_norm_leaves_gradients_and_log_alone(trainer_of):
    trainer = trainer_of()
    batches = first_step(trainer)
    trainer._tr_loss = trainer.training_step(trainer.model, batches[0], supervised(batches))
    before = float(trainer._tr_loss)
    assert trainer._get_grad_norm(trainer.model, grad_norm=1.5) == 1.5
    assert float(trainer._tr_loss) == before and trainer.skipped.total == 0
    assert all(weight.grad is not None for weight in trainer.model.parameters())


def test_in_fp16_the_scale_is_halved_before_a_step_counts_as_broken(trainer_of):
    trainer = trainer_of(max_skipped_steps=1)
    batches = first_step(trainer)
    trainer.args.fp16 = True
    trainer._tr_loss = trainer.training_step(trainer.model, batches[0], supervised(batches))
    for _ in range(HALVINGS):
        trainer._get_grad_norm(trainer.model, grad_norm=math.inf)
    assert all(weight.grad is not None for weight in trainer.model.parameters())
    with pytest.raises(NonFiniteError):
        trainer._get_grad_norm(trainer.model, grad_norm=math.inf)


def test_the_rows_that_break_a_step_are_named(trainer_of):
    trainer = trainer_of()
    rows = trainer.train_dataset[0]["rows"]
    assert trainer._rows_not_finite() == []
    break_weight(trainer)
    found = trainer._rows_not_finite()
    assert len(found) == 16 and found[0].startswith(f"row {rows[0]} (")


@pytest.mark.parametrize("evaluated", [1, 5, "auto"])
def test_the_evaluation_is_the_mean_over_tokens_however_rows_are_batched(trainer_of, evaluated):
    trainer = trainer_of(evaluated=evaluated)
    loader = [trainer._eval_collator([batch]) for batch in trainer.eval_dataset]
    score = TokenScore.of(sum(score_batch(trainer.model.eval(), batch) for batch in loader))
    whole = trainer_of(evaluated=21).evaluate()
    trainer.model.train()
    state = torch.random.get_rng_state()
    found = trainer.evaluate()
    assert torch.equal(torch.random.get_rng_state(), state) and trainer.model.training
    assert_same_values([found["eval_loss"]] * 2, [score.loss, whole["eval_loss"]], NEAR)
    assert found["eval_token_accuracy"] == pytest.approx(whole["eval_token_accuracy"])
    assert trainer.data_collator is trainer._train_collator


def test_phases_are_told_to_a_probe(trainer_of):
    trainer, phases = trainer_of(), []
    batches = first_step(trainer)
    trainer.begin_phase = phases.append
    trainer.training_step(trainer.model, batches[0], supervised(batches))
    trainer.evaluate()
    assert phases == ["forward", "backward", "evaluation"]


def test_lora_plus_gives_the_b_matrices_a_rate_of_their_own_and_nothing_else(trainer_of):
    trainer = trainer_of(mode="lora", lora={"plus_ratio": 4, "modules_to_save": ["norm"]})
    optimizer = trainer.create_optimizer()
    names = {weight: name for name, weight in trainer.model.named_parameters()}
    rates = {names[weight]: group["lr"] for group in optimizer.param_groups for weight in group["params"]}
    trained = {name for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    assert set(rates) == trained and any("norm" in name for name in rates)
    rate = trainer.args.learning_rate
    assert all(found == (4 * rate if "lora_B" in name else rate) for name, found in rates.items())
    assert all(group["params"] for group in optimizer.param_groups)
    assert trainer.create_optimizer() is optimizer  # not divided again


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("mode", ["lora", "qlora"])
def test_what_is_trained_whole_has_the_type_of_the_model_or_under_autocast_fp32(trainer_of, mode, precision):
    trainer = trainer_of(
        mode=mode,
        lora={"modules_to_save": ["norm"]},
        dtype="bfloat16",
        mixed_precision=precision,
        max_steps=1,
    )
    named = list(trainer.model.named_parameters())
    types = {"modules_to_save" in name: weight.dtype for name, weight in named if weight.requires_grad}
    assert types == {False: torch.float32, True: torch.bfloat16 if precision == "no" else torch.float32}
    assert trainer.train().metrics["train_loss"] > 0


def test_what_has_8_bit_states_does_not_depend_on_an_earlier_run_of_the_process(trainer_of):
    whole = trainer_of(optimizer="adamw_8bit", max_steps=1)
    whole.train()
    embedding = whole.model.get_input_embeddings().weight
    assert whole.optimizer.param_groups[0]["params"][0] is embedding
    assert whole.optimizer.state[embedding]["state1"].dtype == torch.float32
    held = GlobalOptimManager.get_instance()
    assert any(module.weight is embedding for module, *_ in held.module_weight_config_triple)
    adapted = trainer_of(mode="lora", lora={"r": 128}, optimizer="adamw_8bit", max_steps=1)
    adapted.train()
    first = adapted.optimizer.param_groups[0]["params"][0]
    assert first.numel() >= EIGHT_BIT_FROM
    assert adapted.optimizer.state[first]["state1"].dtype == torch.uint8
    assert not any(module.weight is embedding for module, *_ in held.module_weight_config_triple)
    forget_embeddings(adapted.args)
    assert not held.module_weight_config_triple


def test_weights_are_averaged_where_they_are_used_and_not_where_they_are_trained(trainer_of):
    pytest.importorskip("schedulefree")
    trainer = trainer_of(optimizer="schedule_free_adamw", lr_schedule="constant")
    trainer.train()
    weight = next(weight for weight in trainer.model.parameters() if weight.dim() > 1)
    trainer.optimizer.train()
    trained = weight.detach().clone()
    with averaged(trainer.optimizer):
        assert not torch.equal(weight, trained)
    torch.testing.assert_close(weight.detach(), trained)


def test_before_there_is_an_optimizer_nothing_is_averaged(trainer_of):
    trainer = trainer_of(optimizer="adamw")
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    assert trainer.evaluate()["eval_loss"] > 0 and trainer.optimizer is None
    assert all(map(torch.equal, before, trainer.model.parameters()))


def test_a_checkpoint_is_published_whole_without_card_and_the_best_one_is_loaded(trainer_of, capsys):
    trainer = trainer_of(save_steps=2, eval_steps=2, max_steps=4)
    trainer.train()
    checkpoints = Path(trainer.args.output_dir)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    assert not list(checkpoints.rglob("README.md")) and trainer.state.total_flos == 0
    best = checkpoints / "checkpoint-2" / "model.safetensors"
    for damaged in (False, True):
        if damaged:
            flip_bit(best, -1)
        trainer.state.best_model_checkpoint = str(best.parent)
        with torch.no_grad():
            trainer.model.model.norm.weight.fill_(7)
        trainer._load_best_model()
        assert bool((trainer.model.model.norm.weight == 7).all()) is damaged
    assert trainer.state.best_model_checkpoint is None
    assert "the weights of the last step are kept" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("broken", ["weight", "optimizer"])
def test_nothing_is_written_from_weights_or_moments_that_are_not_finite(trainer_of, broken):
    trainer = trainer_of(save_steps=4, eval_steps=4, max_steps=4)
    trainer.train()
    trainer.state.global_step = 5
    if broken == "weight":
        break_weight(trainer)
    else:
        next(iter(trainer.optimizer.state.values()))["exp_avg"].fill_(math.inf)
    with pytest.raises(NonFiniteError, match=r"is NaN or infinite"):
        trainer._save_checkpoint(trainer.model, None)
    assert [path.name for path in Path(trainer.args.output_dir).iterdir()] == ["checkpoint-4"]


def test_the_loss_in_the_log_is_that_of_the_steps_that_were_not_skipped(trainer_of):
    trainer = trainer_of()
    for finite in (True, False):
        trainer.skipped.count(finite=finite)
    trainer.log({"loss": 1.0, "grad_norm": math.inf, "learning_rate": 1e-3})
    record = trainer.state.log_history[-1]
    assert record["loss"] == 2.0 and "grad_norm" not in record
    assert "speed/tokens_per_second" in record and "memory/peak_gib" in record


def test_a_checkpoint_is_listed_once_all_ranks_have_written_their_files(trainer_of, monkeypatch):
    """safetensors writes under a temporary name; another rank may still be at it when this one is done."""
    trainer = trainer_of()
    writer, trainer.state.global_step = trainer._writer, 1
    folder = writer.staging / "checkpoint-1"

    def wait_for_all(value):
        for path in folder.glob(".tmp*"):
            path.rename(folder / "optimizer_shard_0.safetensors")
        return [value]

    monkeypatch.setattr("sft_play.train.checkpoints.from_all", wait_for_all)
    with writer.staged(trainer.state):
        folder.mkdir(parents=True)
        (folder / ".tmpAbCd").write_bytes(b"half")
    published = writer.staging.parent / "checkpoint-1"
    assert set(read_manifest(published)["files"]) == {"trainer_state.json", "optimizer_shard_0.safetensors"}


def test_the_loss_that_balances_experts_is_learned_but_not_reported(tiny_model, tmp_path):
    torch.manual_seed(0)
    config = small_config("mixtral", WIDE | {"layers": 2, "vocabulary": VOCABULARY})
    mixture = shutil.copytree(tiny_model, tmp_path / "mixture")
    AutoModelForCausalLM.from_config(config).save_pretrained(mixture)
    shares, gradients = [], []
    for weight in (0.0, 0.5):
        settings = {"mode": "full", "batch_size": 4, "router_aux_loss_coef": weight}
        trainer = prepare_session(
            make_job(mixture, tmp_path, f"{weight}", **settings), announce=False
        ).trainer
        batch = first_step(trainer)[0]
        shares.append(trainer.training_step(trainer.model, batch, supervised([batch])).item())
        gradients.append([each.grad for name, each in trainer.model.named_parameters() if "gate." in name])
        trainer.skipped.count(finite=True)
        trainer.log({"loss": shares[-1], "learning_rate": 0.1})
        assert ("router_aux_loss" in trainer.state.log_history[-1]) == (weight > 0)
    assert shares[0] == shares[1]
    assert len(gradients[0]) == 2 and not any(map(torch.equal, *gradients))
    trainer.model.zero_grad()
    filler = {**batch, "labels": torch.full_like(batch["labels"], IGNORED)}
    trainer.training_step(trainer.model, filler, supervised([batch]))
    assert all(not each.grad.any() for each in trainer.model.parameters() if each.grad is not None)
    trainer.skipped.count(finite=True)
    trainer.log({"loss": 0.0, "learning_rate": 0.1})
    assert trainer.state.log_history[-1]["router_aux_loss"] == 0


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("name", ["paged_adamw_8bit", "paged_lion_32bit"])
def test_the_states_of_a_checkpoint_are_paged(trainer_of, monkeypatch, name):
    """A CPU pages nothing, so it is the buffers that an optimizer makes on a GPU which are looked at."""
    trainer, made = trainer_of(), []
    trainer.args.optim = name  # which a plan for a CPU would refuse
    first = trainer.create_optimizer()
    for weight in trainer.model.parameters():
        weight.grad = torch.randn_like(weight)
    first.step()
    trainer.optimizer = None
    later = trainer.create_optimizer()
    make = later.get_state_buffer
    monkeypatch.setattr(later, "get_state_buffer", lambda *args: made.append(make(*args)) or made[-1])
    later.load_state_dict(first.state_dict())
    for before, after in zip(first.state.values(), later.state.values(), strict=True):
        assert after.keys() == before.keys() and after["step"] == 1
        assert all(torch.equal(after[key], before[key]) for key in after if key != "step")
        assert all(any(after[key] is each for each in made) for key in {"state1", "state2"} & after.keys())
