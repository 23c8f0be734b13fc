"""What the benchmarks make of their records."""

from __future__ import annotations

import argparse
import json
import time
from types import SimpleNamespace

import pytest

from benchmarks.compare import acceptance, merge, outputs_equal, print_tables, speed_ups
from benchmarks.engine_worker import Step, WorkClock, answer, further_sampling, sampling_fields, while_full
from benchmarks.first_token import ADDED, cut_prompts
from benchmarks.micro.alignment import WINDOW_RADIUS, compiled, path_cost, plain_dtw
from benchmarks.micro.alignment_peers import peers
from benchmarks.prompts import Prompt, load_prompts
from benchmarks.run import Engine, batches, parse_systems
from benchmarks.run import measure as run_measure
from benchmarks.systems import parse_system
from benchmarks.time_shares import PARTS, shares
from vllm_tokentiming.tiny_pair import tiny_pair


def record(system, temperature, *, question, seconds, ids=(1, 2, 3, 4), task="qa", **speculation):
    return {
        "system": system,
        "temperature": temperature,
        "task": task,
        "question_ids": [question],
        "seconds": seconds,
        "token_ids": [list(ids)],
        "speculation": speculation,
    }


def end_to_end(*records):
    return {"kind": "end_to_end", "records": list(records)}


def test_speed_ups_are_of_the_same_prompt_at_the_same_temperature():
    document = end_to_end(
        record("none", 0.0, question=1, seconds=4.0),
        record("none", 1.0, question=1, seconds=6.0),
        record("ours", 0.0, question=1, seconds=2.0),
        record("ours", 1.0, question=1, seconds=2.0),
        record("ours", 0.0, question=2, seconds=2.0),  # without a baseline it tells nothing
    )
    ratios = speed_ups(document, baseline="none")
    assert ratios[0.0, "ours"] == {"qa": [2.0]}
    assert ratios[1.0, "ours"] == {"qa": [3.0]}


def test_a_baseline_measured_at_one_temperature_serves_all():
    document = end_to_end(
        record("none", 0.0, question=1, seconds=4.0),
        record("ours", 1.0, question=1, seconds=2.0),
        record("ours", 1.0, question=2, seconds=2.0),
    )
    assert speed_ups(document, baseline="none")[1.0, "ours"] == {"qa": [2.0]}


def test_acceptance_sums_counters_before_it_divides():
    counts = {"drafts": 2, "draft_tokens": 8, "accepted_tokens": 2, "accepted_tokens_per_pos": [1, 1]}
    more = {"drafts": 2, "draft_tokens": 2, "accepted_tokens": 2, "accepted_tokens_per_pos": [2, 0]}
    renamed = [
        {("accepted_per_position" if key == "accepted_tokens_per_pos" else key): value for key, value in each.items()}
        for each in (counts, more)
    ]
    document = end_to_end(*(record("ours", 0.0, question=n, seconds=1.0, **each) for n, each in enumerate(renamed)))
    row = acceptance(document)[0.0, "ours"]
    assert row == {"accepted share": 0.4, "accepted length": 2.0, "by position": [0.75, 0.25]}


def test_concurrencies_have_tables_of_their_own(capsys):
    document = end_to_end(
        *(
            record(system, 0.0, question=batch, seconds=seconds, drafts=0) | {"batch": batch}
            for system, seconds_by_batch in (("none", (4.0, 6.0)), ("ours", (2.0, 6.0)))
            for batch, seconds in zip((1, 8), seconds_by_batch, strict=True)
        )
    )
    print_tables(document)
    printed = capsys.readouterr().out
    assert printed.index("1 at once") < printed.index("| 0.0 | ours | 2.00 |")
    assert printed.index("8 at once") < printed.index("| 0.0 | ours | 1.00 |")


def test_a_batch_is_full_from_the_last_first_token_until_too_few_are_left():
    steps = [Step(1.0, 2, 1, 3), Step(2.0, 4, 2, 3), Step(4.0, 10, 3, 2), Step(5.0, 12, 3, 1), Step(9.0, 13, 3, 0)]
    assert while_full(steps, slots=2) == {"seconds": 2.0, "tokens": 6}
    assert while_full(steps, slots=3) is None
    assert while_full(steps, slots=1) == {"seconds": 4.0, "tokens": 10}


def test_full_batches_have_a_table_of_their_own(capsys):
    records = [
        record("none", 0.0, question=1, seconds=4.0) | {"batch": 2, "full": {"seconds": 2.0, "tokens": 2}},
        record("ours", 0.0, question=1, seconds=4.0) | {"batch": 2, "full": {"seconds": 1.0, "tokens": 3}},
    ]
    print_tables(end_to_end(*records))
    printed = capsys.readouterr().out
    assert "| 0.0 | ours | 1.00 |" in printed
    assert "| 0.0 | ours | 3.00 |" in printed.split("while as many requests ran")[1]
    print_tables(end_to_end(record("none", 0.0, question=1, seconds=1.0)))
    assert "while as many" not in capsys.readouterr().out


def test_time_after_the_first_token_has_a_table_of_its_own(capsys):
    records = [  # four tokens each
        record("none", 0.0, question=1, seconds=4.0) | {"first_token_seconds": [1.0]},
        record("ours", 0.0, question=1, seconds=2.0) | {"first_token_seconds": [1.0]},
    ]
    print_tables(end_to_end(*records))
    printed = capsys.readouterr().out
    assert "| 0.0 | ours | 2.00 |" in printed
    assert "| 0.0 | ours | 3.00 |" in printed.split("after the first token")[1]
    batch = [each | {"batch": 2, "first_token_seconds": [1.0, 1.0]} for each in records]
    print_tables(end_to_end(*batch))
    assert "after the first token" not in capsys.readouterr().out


def test_outputs_are_compared_at_temperature_0_only():
    document = end_to_end(
        record("none", 0.0, question=1, seconds=1.0),
        record("ours", 0.0, question=1, seconds=1.0),
        record("none", 0.0, question=2, seconds=1.0),
        record("ours", 0.0, question=2, seconds=1.0, ids=(1, 2, 3, 5)),
        record("ours", 1.0, question=1, seconds=1.0, ids=(9, 9, 9, 9)),
    )
    assert outputs_equal(document, baseline="none") == {"ours": (1, 2)}


def test_tasks_take_turns_so_that_a_run_cut_short_has_seen_all():
    prompts = [Prompt(task=task, question_id=n, text="") for task in ("a", "b") for n in range(3)]
    turns = [[(prompt.task, prompt.question_id) for prompt in batch] for batch in batches(prompts, 2)]
    assert turns == [[("a", 0), ("a", 1)], [("b", 0), ("b", 1)], [("a", 2)], [("b", 2)]]


def test_time_shares_add_up():
    one = {"temperature": 0.0, "cycles": 2, "tokens": 5, **dict.fromkeys(PARTS, 0.5)}
    assert shares({"records": [one, one]})[0.0] == {"cycles": 4, "tokens": 10, **dict.fromkeys(PARTS, 1.0)}


def part(*records, system="none", **settings):
    return {"systems": [{"name": system}], "settings": {"per_task": 12, **settings}, "records": list(records)}


def test_parts_of_a_run_make_one_document():
    one, two = (record("none", 0.0, question=n, seconds=1.0) for n in (1, 2))
    merged = merge([part(one, skip=0, output="a.json"), part(two, skip=6, output="b.json")])
    assert merged["records"] == [one, two]


def test_systems_that_ran_one_after_the_other_make_one_document():
    one, two = (record(system, 0.0, question=1, seconds=1.0) for system in ("none", "ours"))
    merged = merge([part(one, skip=0), part(two, system="ours", skip=0)])
    assert merged["records"] == [one, two]
    assert [system["name"] for system in merged["systems"]] == ["none", "ours"]


def test_parts_with_other_settings_are_refused():
    with pytest.raises(ValueError, match="differ in max_tokens"):
        merge([part(max_tokens=64), part(max_tokens=128)])
    with pytest.raises(ValueError, match="differ in skip"):
        merge([part(skip=0), part(system="ours", skip=6)])


def test_the_parts_of_a_run_have_the_questions_of_the_whole(tmp_path):
    file = tmp_path / "question.jsonl"
    questions = [{"question_id": n, "category": "qa", "turns": [f"question {n}"]} for n in range(10)]
    file.write_text("\n".join(json.dumps(question) for question in questions))
    whole = load_prompts(file, tasks=["qa"], per_task=4)
    assert [prompt.question_id for prompt in whole] == [0, 2, 5, 7]
    assert load_prompts(file, tasks=["qa"], per_task=4, skip=3) == whole[3:]
    for skip in (4, -1):
        with pytest.raises(ValueError, match=f"{skip} of 4 questions of each task are skipped"):
            load_prompts(file, tasks=["qa"], per_task=4, skip=skip)


def test_prompts_of_a_length_do_not_overlap_and_take_turns():
    pieces = cut_prompts(range(1000), [10, 20], repeats=3)
    assert [length for length, _ in pieces] == [10, 20] * 3
    assert all(len(ids) == length + ADDED for length, ids in pieces)
    tokens = [token for _, ids in pieces for token in ids]
    assert len(set(tokens)) == len(tokens)


def test_prompts_longer_than_the_text_are_refused():
    with pytest.raises(ValueError, match="100 tokens, which is too few"):
        cut_prompts(range(100), [50], repeats=2)


AUTHORS = """
class Generator:
    def token_distance(self, a: str, b: str) -> float:
        return editdistance.eval(a.replace(self.blending_special_token, ""), b.replace(self.base_special_token, ""))

    def dtw(self, series_1: List[str], series_2: List[str], window: int = None) -> Tuple:
        window = window or self._dtw_window
        return [(i, i) for i in range(len(series_1))], [], []
"""


def test_peers_find_paths_of_the_same_cost(tmp_path):
    for package in ("editdistance", "rapidfuzz", "dtw"):
        pytest.importorskip(package, reason="only the extra 'peers' installs what the alignment is compared with")
    pair = ([" New", " York", " is", " big"], [" New York", " is", " b", "ig", "."])
    expected = compiled([pair])().cost.tolist()[0]
    assert path_cost(plain_dtw(*pair), *pair) == expected
    found = dict(peers(window_radius=WINDOW_RADIUS, authors=None))
    assert set(found) == {"plain Python + editdistance", "rapidfuzz + dtw-python"}
    assert {name: path_cost(align(*pair), *pair) for name, align in found.items()} == dict.fromkeys(found, expected)


def test_the_two_methods_of_the_authors_are_run_alone(tmp_path):
    pytest.importorskip("editdistance", reason="only the extra 'peers' installs what the alignment is compared with")
    file = tmp_path / "candidate_generator.py"
    file.write_text("import transformers_of_another_time\n" + AUTHORS, encoding="utf-8")
    align = dict(peers(window_radius=WINDOW_RADIUS, authors=file))["authors' DTW"]
    assert align(["a", "b"], ["a", "b"]) == [(0, 0), (1, 1)]


def test_a_file_of_the_authors_without_these_methods_is_refused(tmp_path):
    pytest.importorskip("editdistance", reason="only the extra 'peers' installs what the alignment is compared with")
    (tmp_path / "other.py").write_text("pass\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no methods dtw and token_distance"):
        dict(peers(window_radius=WINDOW_RADIUS, authors=tmp_path / "other.py"))


@pytest.mark.parametrize("kind", ["end_to_end", "time_shares", "soak"])
def test_plots_are_drawn_and_the_same_each_time(tmp_path, kind):
    pytest.importorskip("matplotlib", reason="plots are drawn by matplotlib, which only the extra 'plots' installs")
    from benchmarks.plots import draw

    document = {
        "end_to_end": end_to_end(
            *(record(system, 0.0, question=q, seconds=1.0 + q) for system in ("none", "ours") for q in range(3))
        ),
        "time_shares": {
            "kind": kind,
            "records": [{"temperature": 0.0, "cycles": 2, "tokens": 5, **dict.fromkeys(PARTS, 0.5)}],
        },
        "soak": {
            "kind": kind,
            "samples": [
                {"seconds": 15.0 * n, "resident_bytes": 2**30, "drafted": 20 * n, "accepted": 9 * n} for n in range(40)
            ],
        },
    }[kind]
    for name in ("one.svg", "two.svg"):
        draw(document, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert b"</svg>" in (tmp_path / "one.svg").read_bytes()


def test_what_has_no_plot_is_refused(tmp_path):
    pytest.importorskip("matplotlib", reason="plots are drawn by matplotlib, which only the extra 'plots' installs")
    from benchmarks.plots import draw

    with pytest.raises(ValueError, match="no plot of 'acceptance'"):
        draw({"kind": "acceptance"}, tmp_path / "none.svg")


def test_step_clock_times_what_a_step_runs():
    from benchmarks.time_shares import StepClock

    totals = dict.fromkeys((f"seconds/{stage}" for stage in ("context", "draft", "proposal", "rows")), 0.0)
    runner = SimpleNamespace(drafter=SimpleNamespace(_metrics=SimpleNamespace(totals=totals)))

    def propose():
        totals["seconds/draft"] += 0.001

    def sample():
        runner.propose_draft_token_ids()  # looked up when it is called, as vLLM does

    runner.execute_model = lambda: None
    runner.propose_draft_token_ids = propose
    runner.sample_tokens = sample
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    core = SimpleNamespace(engine_core=SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker)))

    def step():
        runner.execute_model()
        runner.sample_tokens()
        return ["output"]

    clock = StepClock(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core, step=step)))
    outputs, parts = clock.step()
    assert outputs == ["output"]
    assert set(parts) == set(PARTS)
    assert parts["draft"] == pytest.approx(0.001)
    assert parts["target pass"] > 0.0
    assert parts["rest of vLLM"] > 0.0


def test_hugging_faces_assisted_generation_takes_turns_between_temperatures(tmp_path):
    """At temperature 0 its output is that without a draft, also after it has sampled, which changes the draft."""
    shared = {"model": str(tiny_pair().target), "dtype": "float32"}
    outputs = {}
    for name in ("hf-none", "hf"):
        system = parse_system(name, draft=str(tiny_pair().draft), num_speculative_tokens=4)
        engine = Engine(system, shared, log=tmp_path / f"{name}.log")
        try:
            answers = [
                engine.measure(["List the names."], {"temperature": temperature, "max_tokens": 12})
                for temperature in (0.0, 1.0, 0.0)
            ]
        finally:
            engine.close()
        outputs[name] = [answer["token_ids"][0] for answer in answers]
    assert [len(ids) for ids in outputs["hf"]] == [12, 12, 12]
    assert outputs["hf"][0] == outputs["hf"][2] == outputs["hf-none"][0]


def test_waiting_for_a_turn_takes_no_time_of_the_work_clock():
    def slow_lines():
        for line in ("first", "second"):
            time.sleep(0.2)
            yield line

    clock = WorkClock()
    begun = clock()
    assert list(clock.waiting(slow_lines())) == ["first", "second"]
    assert clock() - begun < 0.1
    time.sleep(0.02)
    assert clock() - begun >= 0.02


class OneTokenAStep:
    """An engine with requests of two tokens, each in steps of a hundredth of a second."""

    def __init__(self):
        self.llm_engine = self
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8))
        self.waiting = {}

    def get_metrics(self):
        return []

    def add_request(self, request_id, _prompt, _sampling):
        self.waiting[request_id] = []

    def has_unfinished_requests(self):
        return any(len(ids) < 2 for ids in self.waiting.values())

    def step(self):
        time.sleep(0.01)
        for ids in self.waiting.values():
            ids.append(len(ids))
        return [
            SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=ids)], finished=len(ids) == 2)
            for name, ids in self.waiting.items()
        ]


def test_a_batch_in_turns_is_the_whole_batch():
    request = {"prompt_token_ids": [[1], [2, 3]], "sampling": {"max_tokens": 2}}
    begun = []
    llm = OneTokenAStep()
    assert answer(llm, {**request, "begin": True}, begun) == {"finished": False}
    assert answer(llm, {"advance": 0.005}, begun) == {"finished": False}  # a step that has begun is finished
    assert answer(llm, {"advance": 0.005}, begun) == {"finished": True}
    in_turns = answer(llm, {"result": True}, begun)
    assert begun == []
    whole = answer(OneTokenAStep(), request, begun)
    assert in_turns["token_ids"] == whole["token_ids"] == [[0, 1], [0, 1]]
    assert (in_turns["turns"], whole["turns"]) == (2, 1)
    for result in (in_turns, whole):
        first, last = result["first_token_seconds"][0], result["seconds"]
        assert 0.01 <= first <= last - 0.01
        assert result["full"] is None  # when the second step ends, none is left


def test_engines_take_turns_until_all_have_finished():
    asked = []

    class Recorded:
        def __init__(self, name, turns):
            self.name, self.turns = name, turns

        def measure(self, _texts, _sampling):
            asked.append((self.name, "whole"))
            return self.name

        def begin(self, texts, _sampling):
            asked.append((self.name, *texts))

        def advance(self, seconds):
            asked.append((self.name, seconds))
            self.turns -= 1
            return self.turns == 0

        def ask(self, request):
            assert request == {"result": True}
            return self.name

    engines = [Recorded("long", 3), Recorded("short", 1)]
    assert list(run_measure(engines, ["text"], {}, alternate=0.5)) == ["long", "short"]
    turns = [("long", 0.5), ("short", 0.5), ("long", 0.5), ("long", 0.5)]
    assert asked == [("long", "text"), ("short", "text"), *turns]
    asked.clear()
    assert list(run_measure(engines, ["text"], {}, alternate=None)) == ["long", "short"]
    assert asked == [("long", "whole"), ("short", "whole")]


def test_hugging_faces_generation_takes_no_turns_within_a_batch_and_no_fields_of_vllms_sampling():
    arguments = SimpleNamespace(
        systems=["none", "hf"], draft="draft", num_speculative_tokens=4, alternate=2.0, sampling={}
    )
    with pytest.raises(ValueError, match="--alternate: only systems of vLLM take turns"):
        parse_systems(arguments)
    arguments.alternate = None
    assert [system.name for system in parse_systems(arguments)] == ["none", "HF assisted"]
    arguments.sampling = {"top_p": 0.8}
    with pytest.raises(ValueError, match="--sampling: only systems of vLLM"):
        parse_systems(arguments)


def test_further_sampling_is_a_json_object():
    assert further_sampling('{"top_p": 0.8, "top_k": 20}') == {"top_p": 0.8, "top_k": 20}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"temperature": 0.7, "top_p": 0.8}', "'temperature' does not belong here: give --temperatures"),
        ('{"max_tokens": 9}', "give --max-tokens"),
        ('{"ignore_eos": false}', "as many tokens"),
        ("[0.8]", "is no JSON object"),
        ("top_p=0.8", "is not JSON"),
    ],
)
def test_further_sampling_that_would_be_overridden_is_refused(text: str, message: str):
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        further_sampling(text)


def test_sampling_of_a_run_is_what_all_systems_get():
    assert sampling_fields({"top_p": 0.8, "top_k": 20}, temperature=0.7, max_tokens=9) == {
        "temperature": 0.7,
        "max_tokens": 9,
        "ignore_eos": True,
        "top_p": 0.8,
        "top_k": 20,
    }
