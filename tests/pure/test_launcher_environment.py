"""Which variables other hosts are given."""

from pathlib import Path

import pytest

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.launcher import runner
from deepspeed.launcher.hostfile import (
    EXPORT_ENVS,
    environment_file_name,
    exported,
    masked,
    read_environment_files,
)


def export(env: dict[str, str], from_files: dict[str, str] | None = None) -> dict[str, str]:
    return exported(env, prefixes=EXPORT_ENVS, cwd="/cwd", from_files=from_files or {})


def test_prefixes_of_clients_count() -> None:
    env = {
        "NCCL_DEBUG": "INFO",
        "UCX_TLS": "tcp",
        "MV2_X": "1",
        "MLFLOW_RUN_ID": "r",
        "PYTHONHASHSEED": "0",
        "HOME": "/h",
        "MY_VAR": "1",
    }
    env |= {"DS_ACCELERATOR": "cpu", "DS_SSH": "x", "PYTHON%%": "no name"}
    wanted = {"NCCL_DEBUG", "UCX_TLS", "MV2_X", "MLFLOW_RUN_ID", "PYTHONHASHSEED", "DS_ACCELERATOR", "PYTHONPATH"}
    assert export(env).keys() == wanted
    assert runner.EXPORT_ENVS is EXPORT_ENVS
    runner.EXPORT_ENVS.append("MY_")
    try:
        assert export(env).keys() == wanted | {"MY_VAR"}
    finally:
        runner.EXPORT_ENVS.remove("MY_")


def test_what_users_set_for_torch_and_its_backends_reaches_other_hosts_and_what_machines_differ_in_does_not() -> None:
    wanted = {
        name: "1"
        for name in ("GLOO_SOCKET_IFNAME", "TORCH_NCCL_BLOCKING_WAIT", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    }
    wanted |= {
        name: "1"
        for name in ("OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING")
    }
    here = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_HOME": "/usr", "TORCHELASTIC_RUN_ID": "x"}
    assert export({**wanted, **here}).keys() == {*wanted, "PYTHONPATH"}


def test_current_directory_leads_and_files_win() -> None:
    assert export({})["PYTHONPATH"] == "/cwd"
    assert export({"PYTHONPATH": "/a:/b"})["PYTHONPATH"] == "/cwd:/a:/b"
    assert export({"NCCL_DEBUG": "INFO"}, {"NCCL_DEBUG": "WARN", "PYTHONPATH": "/c"}) == {
        "NCCL_DEBUG": "WARN",
        "PYTHONPATH": "/c",
    }


def test_aisc_sets_two_by_itself() -> None:
    env = {"NCCL_IB_HCA": "mlx5", "UCX_NET_DEVICES": "x", "NCCL_DEBUG": "INFO"}
    assert export(env).keys() == {*env, "PYTHONPATH"}
    assert export({**env, "AISC_JOB_NAME": "j"}).keys() == {"NCCL_DEBUG", "PYTHONPATH"}


def test_file_text(tmp_path: Path) -> None:
    (tmp_path / "f").write_text('A=1\n\n# note = 1\nB = x=y  \nC="quoted $HOME"\nD=\n')
    wanted = {"A": "1", "B": " x=y", "C": '"quoted $HOME"', "D": ""}
    assert read_environment_files("f", [str(tmp_path)]) == wanted


@pytest.mark.parametrize(
    ("line", "why"),
    [("NOTHING", "has no '='"), ("A-B=1", "not a variable name"), ("=1", "not a variable name"), ("A=\0", "zero byte")],
)
def test_bad_lines_name_file_and_line(tmp_path: Path, line: str, why: str) -> None:
    (tmp_path / ".deepspeed_env").write_text(f"# first\n{line}")
    with pytest.raises(ValueError, match=f"/.deepspeed_env, line 2.*{why}") as caught:
        read_environment_files(".deepspeed_env", [str(tmp_path)])
    assert isinstance(caught.value, DeepSpeedConfigError)
    assert "NOTHING" not in str(caught.value)  # it may be a secret that lost its name


def test_files_home_first(tmp_path: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder, text in ((home, "A=home\nB=home\n"), (here, "B=here\n")):
        folder.mkdir()
        (folder / ".env").write_text(text)
    assert read_environment_files(".env", [str(home), str(here)]) == {"A": "home", "B": "here"}
    assert read_environment_files(str(home / ".env"), [str(home), str(here)]) == {"A": "home", "B": "home"}
    assert read_environment_files(".other", [str(home), str(here)]) == {}


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / ".env").mkdir()
    with pytest.raises(DeepSpeedConfigError, match="cannot be read .Is a directory"):
        read_environment_files(".env", [str(tmp_path)])
    (tmp_path / ".bin").write_bytes(b"A=\xff\xfe\n")
    with pytest.raises(DeepSpeedConfigError, match="not a text file"):
        read_environment_files(".bin", [str(tmp_path)])


def test_names_and_masks() -> None:
    assert environment_file_name({}) == ".deepspeed_env" == environment_file_name({"DS_ENV_FILE": ""})
    assert environment_file_name({"DS_ENV_FILE": "mine"}) == "mine"
    variables = {"HF_TOKEN": "a", "WANDB_API_KEY": "b", "my_password": "c", "NCCL_DEBUG": "INFO", "AWS_SECRET_X": "d"}
    assert masked(variables) == {**dict.fromkeys(variables, "***"), "NCCL_DEBUG": "INFO"}
