import pytest
import regex
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import CHRF

from sft_play.choices.metrics import METRICS, normalise
from sft_play.commands import answers as module
from sft_play.commands.answers import (
    Compared,
    final_answer,
    is_right,
    require_answers,
    score_answer,
    summarise_answers,
    tools_note,
)
from sft_play.config.schema import EvalConfig
from sft_play.errors import ConfigError

GSM8K = r"#### *(\S+)"


def scored(references, answers, pattern=None, *metrics):
    compared = [Compared(*pair) for pair in zip(answers, references, strict=True)]
    settings = EvalConfig(answer_pattern=pattern, **({"metrics": metrics} if metrics else {}))
    scores = [score_answer(each, settings) for each in compared]
    return scores, summarise_answers(compared, scores)


def score_answers(references, answers, pattern=None):
    return scored(references, answers, pattern)[0]


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        ("  two \n words ", "two words"),
        ("1,234", "1234"),
        ("1,234,567.50.", "1234567.50"),
        ("-18.", "-18"),
        ("3.5", "3.5"),
        ("12,34", "12,34"),  # not a thousands comma
        ("Yes, 1,234.", "Yes, 1,234."),  # not a number alone
        ("a, b.", "a, b."),
        ("", ""),
    ],
)
def test_white_space_is_folded_and_numbers_are_normalised(text, folded):
    assert normalise(text) == folded


def test_the_last_match_of_the_pattern_counts_and_its_first_group():
    pattern = regex.compile(GSM8K)
    assert final_answer("#### 3\nno, wait\n#### 1,018.", pattern) == "1018"
    assert final_answer("the answer is 3", pattern) is None
    assert final_answer("b", regex.compile("(a)|b")) == ""
    assert final_answer("a 1 b 2", regex.compile(r"\d")) == "2"


def test_exact_match_compares_only_what_the_pattern_finds():
    references = ["He eats 3 eggs.\n#### 3", "#### 1,000"]
    right, wrong = score_answers(references, ["So three.\n#### 3.", "#### 100"], GSM8K)
    assert (right["exact_match"], wrong["exact_match"]) == (True, False)
    assert [score["exact_match"] for score in score_answers(references, ["3", "1000"], GSM8K)] == [
        False,
        False,
    ]


def test_rows_whose_reference_has_no_match_are_left_out_of_exact_match_and_counted():
    references, answers = ["#### 1", "no number", "#### 2"], ["#### 1", "no number", "#### 3"]
    _, summary = scored(references, answers, GSM8K)
    assert (summary["exact_match"], summary["exact_match_rows"], summary["answered_rows"]) == (0.5, 2, 3)


def test_a_pattern_that_no_reference_holds_is_an_error_and_shows_a_reference():
    with pytest.raises(ConfigError, match="matches none of the 1 references; the first one is 'plain'"):
        require_answers(["plain"], GSM8K)
    require_answers(["plain", "#### 3"], GSM8K)  # one is enough
    require_answers([], GSM8K)
    require_answers(["plain"], None)


def test_rouge_l_and_chrf_are_the_libraries_numbers():
    reference, answer = "The cat sat on the mat, twice.", "A cat_sat near the MAT"
    (score,), summary = scored([reference], [answer])
    assert score["rouge_l"] == RougeScorer(["rougeL"]).score(reference, answer)["rougeL"].fmeasure
    assert score["chrf"] == CHRF().sentence_score(answer, [reference]).score
    assert summary["chrf"] == CHRF().corpus_score([answer], [[reference]]).score
    assert summary["exact_match"] == 0


@pytest.mark.parametrize("text", ["кошка на ковре", "猫坐在垫子上", "Straße müde"])
def test_rouge_l_counts_words_of_every_script(text):
    (same,) = score_answers([text], [text])
    (other,) = score_answers([text], ["nothing"])
    assert (same["rouge_l"], other["rouge_l"]) == (1.0, 0.0)


def test_an_empty_answer_scores_nothing():
    (score,) = score_answers(["something"], [""])
    assert (score["exact_match"], score["rouge_l"], score["chrf"]) == (False, 0.0, 0.0)


@pytest.mark.thorough
def test_a_pattern_that_takes_all_memory_is_refused_on_a_reference_and_no_match_in_an_answer(capsys):
    endless = "ok$|(?=b)(?R)"
    with pytest.raises(ConfigError, match="or too much memory, on a reference; .* without recursion"):
        require_answers(["ok", "b"], endless)
    [score] = score_answers(["ok"], ["b"], endless)
    assert score["exact_match"] is False
    assert "or too much memory, on an answer of 1 characters" in " ".join(capsys.readouterr().out.split())


def test_a_pattern_that_takes_exponential_time_is_refused_on_a_reference_and_no_match_in_an_answer(
    monkeypatch, capsys
):
    monkeypatch.setattr(module, "PATTERN_SECONDS", 0.05)
    slow, endless = "(a|aa)+$", "a" * 60 + "b"
    with pytest.raises(ConfigError, match=r"'\(a\|aa\)\+\$' takes more than 0.05 s, or too much memory, on"):
        require_answers(["a", endless], slow)
    [score] = score_answers(["aaa"], [endless], slow)
    assert score["exact_match"] is False
    assert "on an answer of 61 characters, which counts as no match" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(
    ("name", "answer", "value"),
    [
        ("token_f1", "The cat sat.", 2 * 2 / (3 + 3)),
        ("token_f1", "cat on  CAT ", 2 * 1 / (3 + 3)),
        ("token_f1", "nothing", 0.0),
        ("contains", "I say: a  Cat\nsleeps, it does", True),
        ("contains", "a cat", False),
    ],
)
def test_other_metrics_are_asked_for_by_name(name, answer, value):
    (score,), summary = scored(["a cat sleeps" if name == "contains" else "A cat sat"], [answer], None, name)
    assert score == {name: pytest.approx(value)} and summary[name] == pytest.approx(float(value))
    assert is_right(score, [name]) is (value if name == "contains" else None)


def test_an_empty_reference_and_an_empty_answer_are_the_same():
    assert METRICS["token_f1"].score("", "") == 1.0


def test_a_pattern_is_not_for_calls_of_tools():
    compared = Compared('f({"a": 1})', 'f({"a": 1})', calls=True)
    assert score_answer(compared, EvalConfig(answer_pattern=GSM8K))["exact_match"] is True


def test_calls_of_tools_have_a_score_of_their_own_and_answers_in_words_have_none():
    call, settings = 'f({"a": 1})', EvalConfig()
    compared = [
        Compared(call, call, calls=True),
        Compared("I cannot.", call, calls=True),
        Compared("One.", "One."),
    ]
    scores = [score_answer(each, settings) for each in compared]
    assert [each.get("tool_calls") for each in scores] == [True, False, None] and "tool_calls" not in scores[
        2
    ]
    summary = summarise_answers(compared, scores)
    assert (summary["tool_calls"], summary["tool_calls_rows"], summary["answered_rows"]) == (0.5, 2, 3)
    assert "tool_calls" not in summarise_answers(compared[2:], scores[2:])


def test_a_chat_says_how_to_offer_tools_to_a_run_whose_rows_call_some():
    scores = {"after": {"answered_rows": 6, "tool_calls_rows": 3}}
    assert "`make infer-batch IN=rows.jsonl` takes rows with their own" in tools_note({"eval": scores})
    assert tools_note({"eval": {"after": {"answered_rows": 6}}}) == tools_note({"eval": None}) == ""
