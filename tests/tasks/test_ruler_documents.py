"""Questions about documents: the shipped ones, and files in SQuAD's and HotpotQA's form."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mosaic_opt.tasks import SPLITS, DocumentQuestions
from mosaic_opt.tasks.ruler.questions import read, shipped

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def documents(prompt: str) -> list[str]:
    found = re.findall(r"^Document (\d+): (.*)$", prompt, flags=re.MULTILINE)
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    return [text for _, text in found]


def squad(path: Path, articles: int = 30) -> Path:
    """A file in SQuAD 2.0's form: two paragraphs an article, a question with two answers each, one without any."""
    content = [
        {
            "title": f"Article {i}",
            "paragraphs": [
                {
                    "context": f"The  hill {i}{j} was\nclimbed by Person{i}x{j}. " + f"Grass grew{i}{j} on it. " * 9,
                    "qas": [
                        {
                            "question": f"Who climbed hill {i}{j}?",
                            "answers": [{"text": f"Person{i}x{j}"}, {"text": f"by Person{i}x{j}"}],
                        },
                        {"question": f"Who saw hill {i}{j}?", "answers": [], "is_impossible": True},
                    ],
                }
                for j in (1, 2)
            ],
        }
        for i in range(articles)
    ]
    path.write_text(json.dumps({"version": "v2.0", "data": content}), encoding="utf-8")
    return path


def hotpot(path: Path, rows: int = 90) -> Path:
    """A file in HotpotQA's form: two supporting documents among four; every third answer is yes or no."""
    content = [
        {
            "_id": str(i),
            "question": f"Where does the maker of engine {i} live?",
            "answer": ("yes", "No")[i % 2] if i % 3 == 0 else f"Town{i}z",
            "supporting_facts": [[f"Engine {i}", 0], [f"Maker {i}", 0]],
            "context": [
                [f"Other {i}", [f"Engines{i} are loud.", " They smoke."]],
                [f"Engine {i}", [f"Maker {i} built engine {i}.", " It is old."]],
                [f"Maker {i}", [f"Maker {i} lives in Town{i}z.", " Known in the north; no rain, yes."]],
                [f"More {i}", [f"Towns{i} are big.", " Very."]],
            ],
        }
        for i in range(rows)
    ]
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize(("name", "questions"), [("qa_1", 120), ("qa_2", 60)])
def test_shipped_questions(name: str, questions: int) -> None:
    collection = shipped(name)
    assert len(collection.documents) == len(set(collection.documents)) == 60
    assert len({question.text for question in collection.questions}) == questions
    for question in collection.questions:
        (answer,) = question.answers
        holding = [i for i, text in enumerate(collection.documents) if answer.lower() in text.lower()]
        assert holding[0] in question.gold or len(holding) > 1
        assert sum(i in question.gold for i in holding) == 1
        assert len(question.gold) == int(name[-1])
        assert answer.lower() not in question.text.lower()


@pytest.mark.parametrize(("name", "count"), [("qa_1", 40), ("qa_2", 20)])
@pytest.mark.parametrize("tokens", [512, 1024])
def test_the_answer_stands_in_its_document_alone(
    tokenizer: PreTrainedTokenizerFast, name: str, count: int, tokens: int
) -> None:
    task = DocumentQuestions(name=name, tokens=tokens)
    texts: dict[str, list[str]] = {}
    for split in SPLITS:
        questions = {question.text: question for question in task.questions(split)}
        assert len(questions) == count
        examples = task.examples(tokenizer, split, count)
        asked = [str(re.search(r"^Question: (.*)$", e.prompt, flags=re.MULTILINE)[1]) for e in examples]  # type: ignore[index]
        assert set(asked) == set(questions)
        for example, text in zip(examples, asked, strict=True):
            found = documents(example.prompt)
            gold = [task.collection.documents[i] for i in questions[text].gold]
            assert all(found.count(document) == 1 for document in gold)
            assert len(found) > len(gold)
            holding = [document for document in found if example.references[0].lower() in document.lower()]
            assert len(holding) == 1
            assert holding[0] in gold
            assert len(set(found)) == len(found)
        texts[split] = [questions[text].answers[0].lower() for text in asked]
    assert len(set.union(*map(set, texts.values()))) == sum(len(set(own)) for own in texts.values())


def test_gold_documents_stand_everywhere(tokenizer: PreTrainedTokenizerFast) -> None:
    task = DocumentQuestions(name="qa_1", tokens=1024)
    places = []
    for example in task.examples(tokenizer, "test", 40):
        found = documents(example.prompt)
        (place,) = [i for i, text in enumerate(found) if example.references[0].lower() in text.lower()]
        places.append(place / len(found))
    assert min(places) < 0.15
    assert max(places) > 0.75


def test_more_questions_than_there_are_of_a_split(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="test must be from 1 to 20 examples of qa_2, got 21"):
        DocumentQuestions(name="qa_2").examples(tokenizer, "test", 21)
    with pytest.raises(ValueError, match="split must be one of"):
        DocumentQuestions(name="qa_2").examples(tokenizer, "train", 1)


def test_squad_form(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    task = DocumentQuestions(name="qa_1", path=str(squad(tmp_path / "squad.json")), tokens=600)
    articles: list[set[str]] = []
    for split in SPLITS:
        examples = task.examples(tokenizer, split, len(task.questions(split)))
        assert len(examples) == 20  # ten articles, two paragraphs each, one question with answers
        articles.append({re.sub(r"\D.*", "", e.references[0].removeprefix("Person")) for e in examples})
        for example in examples:
            assert len(example.references) == 2
            assert 570 <= len(example.tokens) <= 600
            found = documents(example.prompt)
            assert sum(example.references[0] in text for text in found) == 1
            assert not any("  " in text for text in found)
            assert task.score(f"It was {example.references[0].upper()}", example) == 1.0
    assert len(set.union(*articles)) == sum(map(len, articles)) == 30


def test_hotpot_form(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    task = DocumentQuestions(name="qa_2", path=str(hotpot(tmp_path / "hotpot.json")), tokens=400)
    total = 0
    seen: list[set[str]] = []
    for split in SPLITS:
        questions = task.questions(split)
        total += len(questions)
        assert not any(question.answers in (("yes",), ("No",)) for question in questions)
        examples = task.examples(tokenizer, split, len(questions))
        seen.append({text for example in examples for text in documents(example.prompt)[:-1]})
        for example in examples:
            found = documents(example.prompt)
            number = example.references[0].removeprefix("Town").removesuffix("z")
            assert f"Engine {number}. Maker {number} built engine {number}. It is old." in found
            lives = f"Maker {number}. Maker {number} lives in {example.references[0]}."
            assert f"{lives} Known in the north; no rain, yes." in found
    assert 0 < total <= 60


def test_a_question_is_left_out_where_a_supporting_document_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "hotpot.json"
    rows = json.loads(hotpot(path).read_text())
    rows[1]["context"] = rows[1]["context"][:1]
    path.write_text(json.dumps(rows))
    assert [question.gold for question in read(path).questions[:2]] == [(1, 2), ()]


@pytest.mark.parametrize("content", ["{}", "[1]", "no json", '{"data": [{"title": "A"}]}', '[{"question": "?"}]'])
def test_other_files_are_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="path must be a JSON file in the form of SQuAD or HotpotQA"):
        DocumentQuestions(name="qa_1", path=str(path)).examples(tokenizer, "test", 1)


def in_squads_form(*questions: Any, context: Any = "Ada lives in York.", title: Any = "A") -> dict[str, Any]:
    return {"data": [{"title": title, "paragraphs": [{"context": context, "qas": list(questions)}]}]}


def in_hotpots_form(**changed: Any) -> list[dict[str, Any]]:
    row = {"question": "Where?", "answer": "York", "supporting_facts": [["A", 0]], "context": [["A", ["In York."]]]}
    return [row, row | changed]


ASKED = {"question": "Where?", "answers": [{"text": "York"}]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "the file must be a list, got None"),
        ({"data": {}}, "the file: data must be a list, got {}"),
        ({"data": ["x"]}, "article 1 must be an object, got 'x'"),
        ({"data": [{"title": "A"}]}, "article 1: paragraphs must be given, got 'title'"),
        (in_squads_form(ASKED, title=5), "article 1: title must be a text, got 5"),
        (in_squads_form(ASKED, title=["A"]), r"article 1: title must be a text, got \['A'\]"),
        (in_squads_form(ASKED, title="\ud83d"), "article 1: title must be Unicode text"),
        (in_squads_form(ASKED, context=5), "article 1, paragraph 1: context must be a text, got 5"),
        (in_squads_form(ASKED, context="A \ud83d"), "article 1, paragraph 1: context must be Unicode text"),
        (
            in_squads_form(ASKED, ASKED | {"question": None}),
            "paragraph 1, question 2: question must be a text, got N",
        ),
        (
            in_squads_form({"question": "?"}),
            "article 1, paragraph 1, question 1: answers must be given, got 'question'",
        ),
        (in_squads_form(ASKED | {"answers": {"text": ["York"]}}), "question 1: answers must be a list, got {'text'"),
        (in_squads_form(ASKED | {"answers": ["York"]}), "question 1, answers must be an object, got 'York'"),
        (in_squads_form(ASKED | {"answers": [{"text": 5}]}), "question 1, answers: text must be a text, got 5"),
        (in_hotpots_form(answer=5), "question 2: answer must be a text, got 5"),
        (in_hotpots_form(answer="\ud83d"), "question 2: answer must be Unicode text"),
        (in_hotpots_form(context={"title": ["A"]}), r"question 2: context must be a list, got {'title': \['A'\]}"),
        (
            in_hotpots_form(context=[["A", "b", "c"]]),
            r"question 2: context must be pairs \[title, list of sentences\]",
        ),
        (in_hotpots_form(context=[["A", "text"]]), "question 2: context must be a list, got 'text'"),
        (in_hotpots_form(context=[["A", [5]]]), "question 2: context must be a text, got 5"),
        (in_hotpots_form(context=[[5, ["x"]]]), "question 2: context must be pairs"),
        (in_hotpots_form(supporting_facts={"title": ["A"]}), "question 2: supporting_facts must be a list, got {"),
        (in_hotpots_form(supporting_facts=[0]), "question 2: supporting_facts must be pairs .*, got 0"),
    ],
)
def test_a_broken_file_is_named_with_the_place_in_one_line(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as caught:
        DocumentQuestions(name="qa_1", path=str(path)).sizes()
    assert str(caught.value).startswith("path must be a JSON file in the form of SQuAD or HotpotQA")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_deeply_nested_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"path must be a JSON file .*deep\.json'"):
        read(path)


def test_equal_questions_count_once(tmp_path: Path) -> None:
    path = tmp_path / "questions.json"
    spaced = {"question": " Where? ", "answers": [{"text": "York"}, {"text": " York"}]}
    path.write_text(json.dumps(in_squads_form(ASKED, spaced, ASKED | {"question": "Where, then?"})))
    assert [question.text for question in read(path).questions] == ["Where?", "Where, then?"]
    path.write_text(json.dumps(in_hotpots_form(context=[["B", ["Other."]], ["A", ["In York."]]])))
    assert len(read(path).questions) == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([], "no questions at all"),
        ({"data": []}, "no questions at all"),
        (in_squads_form(), "no questions at all"),
        (in_squads_form(ASKED | {"answers": []}), "1 without a question or an answer"),
        (in_squads_form(ASKED | {"question": " "}), "1 without a question or an answer"),
        (in_squads_form(ASKED | {"answers": [{"text": "Rome"}]}), "1 whose answers stand in none of their documents"),
        (in_hotpots_form(answer="no")[1:], "1 answered by yes or no alone"),
        (in_hotpots_form(supporting_facts=[["B", 0]])[1:], "1 without their supporting documents"),
    ],
)
def test_a_file_without_a_usable_question_says_why(tmp_path: Path, content: Any, reason: str) -> None:
    path = tmp_path / "unusable.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"path must be a file with questions .*unusable.json has {reason}"):
        DocumentQuestions(name="qa_1", path=str(path)).sizes()


def test_a_split_without_a_title_says_why(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(in_squads_form(ASKED)))
    task = DocumentQuestions(name="qa_1", path=str(path), tokens=300)
    assert task.sizes() == {"calibration": 1, "selection": 0, "test": 0}
    assert len(task.examples(tokenizer, "calibration", 1)) == 1
    with pytest.raises(ValueError, match=r"path must be a file with questions for test: .*one.json .* of 1 titles"):
        task.examples(tokenizer, "test", 1)


def test_blank_documents_stand_in_no_prompt(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    content = in_squads_form(ASKED)
    content["data"][0]["paragraphs"].append({"context": " ", "qas": []})
    path = tmp_path / "blank.json"
    path.write_text(json.dumps(content))
    (example,) = DocumentQuestions(name="qa_1", path=str(path), tokens=300).examples(tokenizer, "calibration", 1)
    assert all(text.strip() for text in documents(example.prompt))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "qa_1", "path": 5}, "path must be a text, not blank, or null, got 5"),
        ({"name": ["qa_1"]}, r"name must be one of qa_1, qa_2, got \['qa_1'\]"),
        ({"name": "qa_3"}, "name must be one of qa_1, qa_2, got 'qa_3'"),
        ({"name": "qa_1", "path": "/nowhere.json"}, "path must be a file or null, got '/nowhere.json'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DocumentQuestions(**arguments)
