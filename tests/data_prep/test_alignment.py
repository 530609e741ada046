"""Tasks of alignment: files without shared prompts, whose answers the rewards judge as they should."""

import json
from collections import Counter

import pytest

from apps.align import rewards
from data_prep import alignment
from hpcai.errors import DataError

SMALL = ["--prompts", "80", "--validation", "24", "--demonstrations", "400", "--pairs", "40"]


def make(out, task, *options):
    assert alignment.main([task, str(out), *SMALL, *options]) == 0
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in out.iterdir()}


both = pytest.mark.parametrize("task", ["arithmetic", "motifs"])


def columns_of(task, prompt):
    """Columns of the reward, by the prompt alone."""
    if task == "arithmetic":
        return {"answer": [str(sum(map(int, prompt[:-1].split("+"))))]}
    composition, motif = prompt[:-1].split()
    return {"motif": [motif], "composition": [composition]}


@both
def test_no_prompt_occurs_twice_and_files_follow_from_the_seed(tmp_path, task):
    first, again, other = (make(tmp_path / str(n), task, "--seed", seed) for n, seed in enumerate("112"))
    assert first == again and first["train"] != other["train"]
    assert [len(first[name]) for name in alignment.FILES] == [80, 24, 400, 40, 24]
    prompts = [row["prompt"] for row in sum(first.values(), [])]
    assert len(set(prompts)) == len(prompts)
    for row in first["train"] + first["validation"]:
        assert {name: [value] for name, value in row.items() if name != "prompt"} == columns_of(task, row["prompt"])


@both
def test_rewards_judge_demonstrations_and_pairs(tmp_path, task):
    files, reward = make(tmp_path, task), getattr(rewards, task)

    def judge(row, name):
        return reward([row["prompt"]], [row[name]], **columns_of(task, row["prompt"]))[0]

    pairs = files["pairs"] + files["validation-pairs"]
    assert {(judge(row, "chosen"), judge(row, "rejected")) for row in pairs} == {(1, 0)}
    assert 0.08 < sum(judge(row, "answer") for row in files["demonstrations"]) / 400 < 0.3


def test_kinds_are_balanced(tmp_path):
    sums, motifs = make(tmp_path / "sums", "arithmetic"), make(tmp_path / "motifs", "motifs")
    for name in ("train", "validation", "demonstrations"):
        pairs = [row["prompt"][:-1].split("+") for row in sums[name]]
        carries = [sum(int(a[-n:]) + int(b[-n:]) >= 10**n for n in (1, 2, 3)) for a, b in pairs]
        assert Counter(carries) == dict.fromkeys(range(4), len(pairs) // 4)
    counts = Counter(row["composition"] for row in motifs["validation"])
    assert len(counts) == 6 and set(counts.values()) == {4}


def test_more_prompts_than_there_are_and_files_that_cannot_be_written_are_refused(tmp_path, capsys):
    assert alignment.main(["motifs", str(tmp_path), "--prompts", "300000"]) == 2
    (tmp_path / "file").write_text("")
    assert alignment.main(["motifs", str(tmp_path / "file"), *SMALL]) == 2
    assert "expected at most 300,000" in (errors := capsys.readouterr().err) and "file: " in errors and "Traceback" not in errors


@pytest.mark.parametrize("completion, right", [
    ("13 13 09 933", 1), ("933", 1), (" 933 \n", 1), ("0 933", 1), ("13 13 09 933.", 0), ("933 0", 0), ("9933", 0), ("0933", 0),
    ("13 13 09 933\0", 0), ("", 0), (" ", 0),
])  # fmt: skip
def test_a_sum_is_right_if_its_last_word_is(completion, right):
    assert rewards.arithmetic(["347+586="] * 2, [completion, "1"], [933, "1"]) == [right, 1]


@pytest.mark.parametrize("motif, composition, completion, right", [
    ("N-x-[ST]", "hydrophobic>=62%", "AAAANASK", 1),
    ("N-x-[ST]", "hydrophobic>=63%", "AAAANASK", 0), ("N-x-[ST]", "hydrophobic>=50%", "AAAANAAK", 0),
    ("C-x(2)-C", "charge>=+2", "KRCAACGG", 1), ("C-x(2)-C", "charge>=+2", "KECAACGG", 0), ("C-x(2)-C", "charge>=+2", "KRCAAACG", 0),
    ("C-x-{P}-C", "charge<=-2", "CAACDEGG", 1), ("C-x-{P}-C", "charge<=-2", "CAPCDEGG", 0),
    ("A-A", "charge>=0", "AAAAAAA", 0), ("A-A", "charge>=0", "A" * 16, 1), ("A-A", "charge>=0", "A" * 17, 0),
    ("A-A", "charge>=0", "AAAAAAAB", 0), ("A-A", "charge>=0", "aaaaaaaa", 0), ("A-A", "charge>=0", "AAAAAAAA\n", 0),
    ("A-A", "charge>=0", "", 0),
])  # fmt: skip
def test_a_sequence_needs_length_letters_motif_and_composition(motif, composition, completion, right):
    assert rewards.motifs([""], [completion], [motif], [composition]) == [right]


@pytest.mark.parametrize("motif, composition", [("N-?-S", "charge>=0"), ("", "charge>=0"), ("A", "weight>=3"), ("A", "charge>=")])
def test_unknown_motifs_and_compositions_are_refused_by_name(motif, composition):
    with pytest.raises(DataError, match=r"expected"):
        rewards.motifs([""], ["AAAAAAAA"], [motif], [composition])
