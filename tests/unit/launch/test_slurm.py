import shlex
import subprocess

import pytest

from sft_play.errors import ConfigError, LaunchError
from sft_play.launch import slurm
from sft_play.launch.slurm import (
    TEMPLATE,
    SlurmJob,
    batch_file,
    read_job,
    refusal,
    sbatch_command,
    submission_summary,
    submit,
)
from sft_play.resources import PACKAGE, SCRIPTS

RUN = {
    "config": "configs/a b.yaml",
    "engine": "ddp",
    "overrides": ["output.name=it's", "data.train_path=$HOME/x"],
    "python": "py",
}


def filled(job: SlurmJob, **run) -> str:
    return batch_file(TEMPLATE.read_text(), job, **{**RUN, **run})


def options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_what_was_asked_for_stands_in_the_batch_file_and_the_rest_stays():
    job = SlurmJob(nodes=4, gpus=8, name="mine", partition="gpu", time="1-00:00:00", account="lab")
    found = options(filled(job))
    for line in (
        "--job-name=mine",
        "--nodes=4",
        "--gres=gpu:8",
        "--partition=gpu",
        "--time=1-00:00:00",
        "--account=lab",
        "--ntasks-per-node=1",
        "--output=logs/train_%j.out",
        "--error=logs/train_%j.err",
        "--requeue",
        "--signal=B:USR1@300",
    ):
        assert found.count(line) == 1, line
    assert len({line.partition("=")[0] for line in found}) == len(found)


@pytest.mark.parametrize(("gpus", "processes"), [("", "0"), ("0", "1")])
def test_no_gpus_are_asked_for_unless_a_number_says_so(gpus, processes):
    text = filled(read_job("2", gpus, "mine"))
    assert "gres" not in "\n".join(options(text)) and f"\nPROCESSES={processes}\n" in text


def test_the_file_is_bash_and_hands_every_word_over_as_it_was_typed(tmp_path):
    text = filled(SlurmJob(nodes=2, gpus=1, name="mine"))
    file = tmp_path / "train.sbatch"
    file.write_text(text)
    assert subprocess.run(["bash", "-n", str(file)]).returncode == 0
    head = text[: text.index("# The launchers end together")]
    env = {"PATH": "/usr/bin:/bin", "SLURM_RESTART_COUNT": "2", "SLURM_JOB_ID": "7"}
    script = f'set -u\n{head}\nprintf "%s\\n" "${{words[@]}}" "$SCRIPTS" "$PYTHON"'
    lines = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=env
    ).stdout.splitlines()
    assert lines[0].startswith("job 7 runs again (restart 2)")
    argv = [
        "--config",
        RUN["config"],
        "--processes",
        "1",
        "--engine",
        "ddp",
        *RUN["overrides"],
        "train.resume=auto",
    ]
    assert lines[1:] == [*argv, str(SCRIPTS), "py"]


def test_the_template_works_as_it_is_from_the_folder_of_the_repository():
    text = TEMPLATE.read_text()
    head = text[: text.index("# The launchers end together")]
    script = f'set -u\n{head}\nprintf "%s\\n" "${{words[@]}}" "$SCRIPTS"'
    done = subprocess.run(
        ["bash", "-c", script, "sbatch", "train.epochs=1"],
        capture_output=True,
        text=True,
        env={"SLURM_SUBMIT_DIR": "/here"},
    )
    config = "configs/run_distributed.yaml"
    assert done.stdout.splitlines() == [
        "--config",
        config,
        "--processes",
        "0",
        "train.epochs=1",
        "/here/scripts",
    ]
    assert (PACKAGE / config).is_file()


def test_a_template_without_a_variable_is_refused():
    with pytest.raises(LaunchError, match="PROCESSES"):
        batch_file(
            TEMPLATE.read_text().replace("PROCESSES=", "PROCS="),
            SlurmJob(nodes=2, gpus=1, name="mine"),
            **RUN,
        )


@pytest.mark.parametrize(
    ("nodes", "gpus", "knob"), [("0", "1", "NODES=0"), ("two", "1", "NODES=two"), ("2", "-1", "NGPU=-1")]
)
def test_numbers_that_are_none_are_refused(nodes, gpus, knob):
    with pytest.raises(ConfigError, match=f"{knob}: expected a whole number"):
        read_job(nodes, gpus, "mine")


def test_a_value_cannot_bring_lines_of_its_own():
    with pytest.raises(ConfigError, match="more than one line"):
        filled(SlurmJob(nodes=2, gpus=1, name="mine", partition="gpu\nrm -rf /"))


@pytest.mark.parametrize(
    "text",
    [
        "a b'c\"d\\ $(touch pwned) `touch pwned` ${HOME}; touch pwned & # %s ü",
        "two\nlines",
        "data.system_prompt=x\nPYTHON=touch pwned\nENGINE=x\n#SBATCH --partition=other\n",
    ],
)
def test_no_value_is_run_or_mistaken_for_a_line_of_the_template(tmp_path, text):
    job = SlurmJob(nodes=2, gpus=1, name="mine", partition="gpu")
    filled_in = batch_file(
        TEMPLATE.read_text(), job, config=text, engine="ddp", overrides=[text, "a.b=c"], python=text
    )
    head = filled_in[: filled_in.index("# The launchers end together")]
    script = f'set -u\n{head}\nprintf "%s\\0" "${{words[@]}}" "$PYTHON" "$ENGINE"'
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}
    )
    assert done.stdout.split("\0")[:-1] == [
        *("--config", text, "--processes", "1", "--engine", "ddp"),
        *(text, "a.b=c", text, "ddp"),
    ]
    assert not list(tmp_path.iterdir())
    assert options(filled_in).count("--partition=gpu") == 1


def test_open_quotation_marks_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="SBATCH=--x='y: no closing quotation"):
        sbatch_command(tmp_path / "x", SlurmJob(nodes=1, gpus=1, name="mine", more="--x='y"))


def test_a_name_that_is_no_file_name_becomes_one():
    assert read_job("1", "", "a/b c").name == "a-b-c"


def test_further_words_reach_sbatch_one_by_one(tmp_path):
    job = SlurmJob(nodes=2, gpus=1, name="mine", more='--qos=high --comment="two words"')
    assert sbatch_command(tmp_path / "x", job) == [
        "sbatch",
        "--parsable",
        "--qos=high",
        "--comment=two words",
        str(tmp_path / "x"),
    ]


def test_what_sbatch_says_becomes_one_sentence():
    errors = (
        "sbatch: error: invalid partition specified: x\n"
        "sbatch: error: Batch job submission failed: Invalid name\n"
    )
    reasons = "invalid partition specified: x; Batch job submission failed: Invalid name"
    assert refusal(errors) == f"sbatch rejected the job: {reasons}"


def test_a_submitted_job_is_told_with_its_logs_and_what_to_type():
    text = submission_summary("42", SlurmJob(nodes=2, gpus=4, name="mine"))
    for part in (
        "job 42: 2 nodes, 4 GPUs per node",
        "logs/train_42.out",
        "logs/train_42.err",
        "squeue --job 42",
        "scancel 42",
    ):
        assert part in text


def test_without_slurm_the_command_of_each_machine_is_printed(monkeypatch):
    monkeypatch.setattr(slurm.shutil, "which", lambda name: None)
    with pytest.raises(LaunchError) as error:
        submit(
            SlurmJob(nodes=2, gpus=4, name="mine"),
            config="configs/x.yaml",
            engine="ddp",
            overrides=["train.epochs=1"],
        )
    commands = [shlex.split(line) for line in str(error.value).splitlines()[1:]]
    shared = [
        "MASTER_ADDR=<address of machine 0>",
        "NGPU=4",
        "ENGINE=ddp",
        "CONFIG=configs/x.yaml",
        "ARGS=train.epochs=1",
    ]
    for rank, argv in enumerate(commands):
        assert " ".join(argv) == " ".join(["make train-multinode NODES=2", f"RANK={rank}", *shared])
    assert len(commands) == 2
