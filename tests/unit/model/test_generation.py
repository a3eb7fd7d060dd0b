import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sft_play.config.schema import ModelConfig
from sft_play.data.chat import make_chat
from sft_play.data.tokens import prompt_ids
from sft_play.errors import DataError, DoesNotFitError
from sft_play.model.generation import (
    answer_batches,
    end_of_turn_id,
    generate,
    generate_answers,
    in_batches,
    stop_token_ids,
)
from sft_play.model.load import load_tokenizer
from sft_play.rows.formats import Conversation


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return load_tokenizer(ModelConfig(name=str(tiny_model)))


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model).eval()


PROMPTS = [[5, 6, 7], [9], [30, 31, 32, 33, 34, 35, 36], [50, 51], [60, 61, 62]]


def alone(model, prompt, tokens):
    """Greedy decoding as one writes it by hand: no cache, no padding, no library."""
    ids = list(prompt)
    for _ in range(tokens):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_a_batch_of_different_lengths_gives_each_prompt_what_it_gets_alone(model, tokenizer):
    new = generate(model, tokenizer, PROMPTS, max_new_tokens=6)
    assert new == [alone(model, prompt, 6) for prompt in PROMPTS]


def test_answers_come_in_the_order_of_the_prompts_whatever_the_batch_size(model, tokenizer):
    one = generate_answers(model, tokenizer, PROMPTS, max_new_tokens=6, batch_size=1)
    assert one == generate_answers(model, tokenizer, PROMPTS, max_new_tokens=6, batch_size=4)
    assert [answer.text for answer in one] == [
        tokenizer.decode(alone(model, p, 6), skip_special_tokens=True) for p in PROMPTS
    ]


def test_the_longest_prompts_are_answered_first(model, tokenizer):
    batches = [rows for rows, _ in answer_batches(model, tokenizer, PROMPTS, max_new_tokens=1, batch_size=2)]
    assert batches == [[2, 0], [4, 3], [1]]


def test_an_answer_ends_at_the_stop_token_and_says_so(model, tokenizer, monkeypatch):
    third = alone(model, PROMPTS[0], 3)[-1]
    monkeypatch.setattr(model.generation_config, "eos_token_id", third)
    (stopped,) = generate_answers(model, tokenizer, PROMPTS[:1], max_new_tokens=9)
    expected = alone(model, PROMPTS[0], 9)
    expected = expected[: expected.index(third)]
    assert (stopped.text, stopped.tokens, stopped.finished) == (
        tokenizer.decode(expected),
        len(expected),
        True,
    )
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    (cut,) = generate_answers(model, tokenizer, PROMPTS[:1], max_new_tokens=2)
    assert (cut.tokens, cut.finished) == (2, False)


def test_penalties_in_the_models_generation_config_do_not_change_a_greedy_answer(
    model, tokenizer, monkeypatch
):
    monkeypatch.setattr(model.generation_config, "repetition_penalty", 5.0)
    monkeypatch.setattr(model.generation_config, "no_repeat_ngram_size", 1)
    assert generate(model, tokenizer, PROMPTS[:1], max_new_tokens=12) == [alone(model, PROMPTS[0], 12)]


def test_a_prompt_near_the_models_limit_is_answered_alone_with_what_is_left(model, tokenizer):
    limit = model.config.max_position_embeddings
    prompts = [[5] * 4, [6] * (limit - 3), [7] * limit]
    answers = {}
    sizes = []
    for rows, made in answer_batches(model, tokenizer, prompts, max_new_tokens=10, batch_size=8):
        answers.update(zip(rows, made, strict=True))
        sizes.append(len(rows))
    assert sizes == [1, 1, 1]
    assert [answers[row].tokens for row in range(3)] == [10, 3, 0]
    assert not answers[2].finished


def test_end_of_turn_is_the_added_token_that_the_template_writes_after_an_answer(tokenizer):
    assert end_of_turn_id(tokenizer) == tokenizer.eos_token_id
    chatml = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    chatml.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    chatml.chat_template = (
        "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
    )
    assert end_of_turn_id(chatml) == chatml.convert_tokens_to_ids("<|im_end|>")
    chatml.add_tokens([" ", "<turn>"])  # not special
    chatml.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} <turn> {% endfor %}"
    assert end_of_turn_id(chatml) == chatml.convert_tokens_to_ids("<turn>")
    chatml.chat_template = None
    assert end_of_turn_id(chatml) is None


def test_all_stop_tokens_are_used(model, tokenizer, monkeypatch):
    monkeypatch.setattr(model.generation_config, "eos_token_id", [17, 18])
    assert stop_token_ids(model, tokenizer) == [tokenizer.eos_token_id, 17, 18]


def test_a_space_at_the_end_of_the_prompt_is_left_to_the_answer_where_the_tokenizer_joins_it_to_the_next_word(
    tokenizer,
):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<eos>", "Q", ":", "\u2581", "a", "\u2581a"])}
    raw = Tokenizer(models.BPE(vocabulary, [("\u2581", "a")]))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    joining = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>")
    joining.chat_template = "{{ messages[0].content }}: "
    prompt = Conversation(({"role": "user", "content": "Q"},))
    assert joining.convert_ids_to_tokens(prompt_ids(make_chat(joining, "assistant"), prompt)) == ["Q", ":"]
    joining.chat_template = "{{ messages[0].content }}:"
    assert joining.convert_ids_to_tokens(prompt_ids(make_chat(joining, "assistant"), prompt)) == ["Q", ":"]
    ids = prompt_ids(make_chat(tokenizer, "assistant"), Conversation(({"role": "user", "content": "w1 w2"},)))
    assert tokenizer.convert_ids_to_tokens(ids) == ["<unk>", "w1", "w2", "<unk>"]


def test_where_memory_runs_out_the_rest_goes_on_with_half_the_batch():
    sizes = []

    def work(rows):
        sizes.append(len(rows))
        if len(rows) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return sum(rows)

    assert list(in_batches([1, 2, 3, 4, 5], 5, work)) == [([1, 2], 3), ([3, 4], 7), ([5], 5)]
    assert sizes == [5, 2, 2, 1]


def test_a_single_row_that_does_not_fit_is_an_error_with_the_setting_to_lower():
    def work(rows):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    with pytest.raises(DoesNotFitError, match=r"out of memory on a single row(.|\n)*eval\.max_new_tokens"):
        list(in_batches([1, 2], 2, work))


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    def work(rows):
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        list(in_batches([1], 1, work))


def test_a_prompt_with_a_token_that_the_model_has_no_row_for_is_refused(model, tokenizer):
    known = model.config.vocab_size
    with pytest.raises(
        DataError, match=f"token {known}, but the model has only the tokens 0 to {known - 1}; "
    ):
        generate(model, tokenizer, [[5], [6, known]], max_new_tokens=1)


def test_where_nothing_ends_an_answer_the_marker_of_the_next_turn_does(tokenizer):
    marking = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    marking.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    marking.chat_template = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} {% endfor %}"
    assert end_of_turn_id(marking) == marking.convert_tokens_to_ids("<|user|>")
