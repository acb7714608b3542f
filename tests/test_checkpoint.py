"""Saving, loading and keeping checkpoints in one process: first everything that can go wrong."""

import json
import os
import pickle
import signal
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minititan.checkpoint import folder
from minititan.checkpoint.checkpointer import Checkpointer
from minititan.checkpoint.folder import check_writable
from minititan.config import ConfigError
from tests.checkpoints import checkpointer, largest_file, newest, seal_again, tensors, with_steps
from tests.distributed.harness import RankError, run_ranks


@pytest.fixture
def saved(tmp_path: Path) -> Checkpointer:
    return with_steps(tmp_path / "checkpoint", 1, 2)


def fails_to_load(there: Checkpointer, source: int | Path, target: dict[str, Tensor], **options) -> str:
    """The error's text, after checking that no tensor was touched."""
    before = {key: tensor.clone() for key, tensor in target.items()}
    with pytest.raises(ConfigError) as caught:
        there.load(source, target, **options)
    assert target.keys() == before.keys()
    assert all(torch.equal(target[key], before[key]) for key in before)
    return str(caught.value)


# Loading: misuse


def test_an_unknown_step_is_named_with_those_that_exist(saved):
    assert fails_to_load(saved, 3, tensors(0)) == (
        f"checkpoint.load_step = 3: {saved.folder} has no such step; there: 1, 2"
    )


def test_a_folder_that_is_no_checkpoint_is_named_with_the_one_inside(saved, tmp_path):
    text = fails_to_load(saved, saved.folder, tensors(0))
    assert text.startswith(f"{saved.folder}: must be a checkpoint") and text.endswith("inside it: step-2")
    assert "nowhere" in fails_to_load(saved, tmp_path / "nowhere", tensors(0))


def test_every_difference_is_named_at_once(saved):
    target = {
        "model.a": torch.zeros(5, 3),
        "model.b": torch.zeros((), dtype=torch.float64),
        "model.c": torch.zeros(2),
        "optimizer.c.exp_avg": torch.zeros(2),
    }
    lines = fails_to_load(saved, 2, target).splitlines()
    where, way_out = f"{saved.folder}/step-2", "use the model and arguments that it was saved with"
    assert lines == [
        f"{where}: lacks model.c; optimizer.c.exp_avg; {way_out}",
        f"{where}: other shapes: model.a [5, 4], here [5, 3]; {way_out}",
        f"{where}: other dtypes: model.b float32, here float64; "
        "use the training.dtype that it was saved with",
        f"{where}: has more than this run: optimizer.a.exp_avg; {OTHER_OPTIMIZER}",
    ]


OTHER_OPTIMIZER = (
    'use the optimizer that it was saved with, or checkpoint.exclude_from_loading = ["optimizer"]'
)


def test_another_optimizer_is_said_to_be_one(saved):
    target = tensors(0)
    target["optimizer.a.momentum_buffer"] = target.pop("optimizer.a.exp_avg")
    assert fails_to_load(saved, 2, target).splitlines() == [
        f"{saved.folder}/step-2: lacks optimizer.a.momentum_buffer; {OTHER_OPTIMIZER}",
        f"{saved.folder}/step-2: has more than this run: optimizer.a.exp_avg; {OTHER_OPTIMIZER}",
    ]


def test_long_lists_are_cut(saved):
    target = tensors(0) | {f"model.more{i}": torch.zeros(1) for i in range(9)}
    assert "model.more4; and 4 more;" in fails_to_load(saved, 2, target)


def test_a_model_only_checkpoint_says_how_it_can_be_used(saved):
    saved.save(3, {key: tensor for key, tensor in tensors(3).items() if key.startswith("model.")}, {})
    text = fails_to_load(saved, 3, tensors(0))
    assert "start from it in another job.dump_folder, checkpoint.load_step to go on" in text
    assert "holds a model only" in text and 'exclude_from_loading = ["optimizer"]' in text
    target = tensors(0)
    saved.load(3, target, exclude=["optimizer"])
    assert target["model.a"].unique().item() == 3 and target["optimizer.a.exp_avg"].unique().item() == 0.5


def test_an_unknown_exclusion_is_an_error(saved):
    assert "optimiser: must be among model, optimizer" in fails_to_load(
        saved, 2, tensors(0), exclude=["optimiser"]
    )


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


@pytest.mark.parametrize(
    "file, content, fault",
    [
        ("COMMIT.json", None, "missing"),
        ("COMMIT.json", b"", "damaged (its content does not have the SHA-256 in its last line)"),
        ("COMMIT.json", b"{}", "damaged (its content does not have the SHA-256 in its last line)"),
        ("train_state.json", None, "missing"),
        ("train_state.json", b"{", "1 bytes, must be "),
        (".metadata", None, "missing"),
        (".metadata", b"", "0 bytes, must be "),
        ("__0_0.distcp", None, "missing"),
        ("__0_0.distcp", b"short", "5 bytes, must be "),
        ("__0_0.distcp", bytes, "damaged (its SHA-256 is not that of what was saved)"),
        (".metadata", bytes, "damaged (its SHA-256 is not that of what was saved)"),
        ("train_state.json", bytes, "damaged (its SHA-256 is not that of what was saved)"),
    ],
)
def test_damage_is_found_before_a_tensor_changes(saved, file, content, fault):
    path = saved.folder / "step-2" / file
    size = path.stat().st_size
    path.unlink()
    if content is not None:
        path.write_bytes(bytes(size) if content is bytes else content)
    if file != "COMMIT.json" or content is not None:
        assert fails_to_load(saved, 2, tensors(0)).startswith(f"{path}: {fault}")
    assert fails_to_load(saved, saved.folder / "step-2", tensors(0)).partition(";")[0].startswith(f"{path}: ")


@pytest.mark.parametrize(
    "content, fault",
    [
        (pickle.dumps({"a": 1}), "damaged ('dict' object has no attribute"),
        (pickle.dumps(Evil()), "mkdir is not a record of tensors"),
    ],
)
def test_metadata_that_lies_runs_no_code_even_when_the_manifest_vouches_for_it(
    saved, content, fault, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = saved.folder / "step-2"
    (path / ".metadata").write_bytes(content)
    seal_again(path)
    text = fails_to_load(saved, 2, tensors(0))
    assert text.startswith(f"{path}/.metadata: ") and fault in text
    assert not Path("evil").exists()


def test_a_shard_that_cannot_be_parsed_is_an_error_that_names_the_checkpoint(saved):
    shard = saved.folder / "step-2" / "__0_0.distcp"
    shard.write_bytes(bytes(shard.stat().st_size))
    seal_again(saved.folder / "step-2")
    with pytest.raises(ConfigError, match=f"{saved.folder}/step-2: damaged"):
        saved.load(2, tensors(0))


# Saving: misuse and failures


def assert_as_saved(there: Checkpointer) -> None:
    assert sorted(os.listdir(there.folder)) == ["step-1", "step-2"]
    for step in (1, 2):
        target = tensors(0)
        there.load(step, target)
        assert all(torch.equal(target[key], tensor) for key, tensor in tensors(float(step)).items())


def test_a_refused_write_names_the_folder_and_costs_nothing(saved):
    with largest_file(100_000), pytest.raises(ConfigError) as caught:
        saved.save(3, tensors(3, size=20_000), {})
    assert str(caught.value) == (
        f'checkpoint.folder = "{saved.folder}": step 3 could not be saved (rank 0: File too large); '
        "make room or set another job.dump_folder; the newest checkpoint is step 2"
    )
    assert_as_saved(saved)


@pytest.mark.parametrize("where", ["fsync", "rename", "mkdir"])
def test_a_failure_at_any_point_leaves_the_checkpoints_as_they_were(saved, tmp_path, monkeypatch, where):
    owner = os if where == "fsync" else Path
    real = getattr(owner, where)
    calls = 0

    def count(*args, **options):
        nonlocal calls
        calls += 1
        return real(*args, **options)

    monkeypatch.setattr(owner, where, count)
    checkpointer(tmp_path / "another").save(1, tensors(1), {})
    # The very last rename and sync come when the step has its name: from there on it is saved.
    last = {"fsync": calls - 1, "rename": calls, "mkdir": calls}[where]
    assert last >= 1
    for failing_call in range(1, last + 1):
        calls = 0

        def refuse(*args, failing_call=failing_call, **options):
            nonlocal calls
            calls += 1
            if calls == failing_call:
                raise PermissionError(13, "Permission denied")
            return real(*args, **options)

        monkeypatch.setattr(owner, where, refuse)
        with pytest.raises(ConfigError, match=r"step 3 could not be saved \(rank 0: Permission denied\)"):
            saved.save(3, tensors(3), {})
        monkeypatch.setattr(owner, where, real)
        assert_as_saved(saved)


def test_a_file_in_the_place_of_the_folder_is_an_error(tmp_path):
    (tmp_path / "checkpoint").write_text("")
    with pytest.raises(
        ConfigError, match=f'checkpoint.folder = "{tmp_path}/checkpoint": step 1 could not be saved'
    ):
        checkpointer(tmp_path / "checkpoint").save(1, tensors(1), {})


def test_a_folder_that_cannot_be_written_is_known_before_anything_is_made(tmp_path, monkeypatch):
    check_writable("job.dump_folder", tmp_path / "new" / "deeper")
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        check_writable("job.dump_folder", tmp_path / "file" / "deeper")
    assert str(caught.value).startswith(
        f'job.dump_folder = "{tmp_path}/file/deeper": {tmp_path}/file must be a folder'
    )
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(ConfigError, match=f'job.dump_folder = "{tmp_path}/new": {tmp_path} must be writable'):
        check_writable("job.dump_folder", tmp_path / "new")


def die_while_renaming(rank: int, world: int, path: Path) -> None:
    setattr(Path, "rename", lambda self, target: os.kill(os.getpid(), signal.SIGKILL))  # noqa: B010
    checkpointer(path).save(3, tensors(3), {})


def test_a_kill_just_before_the_end_leaves_no_checkpoint_and_the_next_save_cleans_up(saved):
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(die_while_renaming, 1, saved.folder)
    torn = [name for name in os.listdir(saved.folder) if name.startswith(".tmp-step-3-")]
    assert len(torn) == 1
    assert newest(saved) == 2
    saved.save(4, tensors(4), {})
    assert sorted(os.listdir(saved.folder)) == ["step-1", "step-2", "step-4"]


def test_every_byte_is_synced_before_the_folder_gets_its_name(tmp_path, monkeypatch):
    synced: dict[str, int] = {}
    real = os.fsync

    def record(descriptor: int) -> None:
        synced[os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))] = os.fstat(descriptor).st_size
        real(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    there = checkpointer(tmp_path / "checkpoint")
    there.save(1, tensors(1), {})
    files = {path.name: path.stat().st_size for path in (there.folder / "step-1").iterdir()}
    assert synced.pop(".metadata.tmp") == files.pop(".metadata")
    assert {name: synced[name] for name in files} == files
    assert "checkpoint" in synced and any(name.startswith(".tmp-step-1-") for name in synced)


def test_tensors_that_are_read_late_are_read_one_by_one_on_a_machine_with_a_gpu_too(tmp_path, monkeypatch):
    """Otherwise the memory of one would be given back before it is written."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    values = {f"model.{i}": torch.full((3,), float(i)) for i in range(4)}
    metas = {key: torch.empty(3, device="meta") for key in values}
    checkpointer(tmp_path).save(1, metas, {}, read=values.__getitem__)
    monkeypatch.undo()
    found = {key: torch.zeros(3) for key in values}
    checkpointer(tmp_path).load(1, found)
    assert all(torch.equal(found[key], value) for key, value in values.items())


# What is there


def test_a_checkpoint_gives_back_what_was_saved(saved):
    target = tensors(0)
    state = saved.load(2, target)
    assert state == {"dataloader": {"samples_consumed": 16}, "tokens_seen": 3}
    assert all(torch.equal(target[key], tensor) for key, tensor in tensors(2.0).items())
    raw = json.loads((saved.folder / "step-2" / "train_state.json").read_text())
    assert raw == state
    commit = json.loads((saved.folder / "step-2" / "COMMIT.json").read_text())
    content, seal = (saved.folder / "step-2" / "COMMIT.json").read_text().split(',\n "sha256": ')
    assert commit.pop("sha256") == sha256(content.encode()).hexdigest() == json.loads(seal[:-3])
    for name, file in commit.pop("files").items():
        data = (saved.folder / "step-2" / name).read_bytes()
        assert file == {"size": len(data), "sha256": sha256(data).hexdigest()}
    assert commit == {
        "format_version": 2,
        "step": 2,
        "tensors": {
            "model.a": {"shape": [5, 4], "dtype": "float32"},
            "model.b": {"shape": [], "dtype": "float32"},
            "optimizer.a.exp_avg": {"shape": [5, 4], "dtype": "float32"},
        },
        "model": {},
        "layout": {"world_size": 1},
        "versions": {"minititan": version("minititan"), "torch": torch.__version__},
    }


def test_sections_that_are_not_asked_for_are_not_loaded(saved):
    target = {key: tensor for key, tensor in tensors(0).items() if key.startswith("model.")}
    state = saved.load(saved.folder / "step-1", target, exclude=["dataloader"])
    assert "dataloader" not in state and target["model.a"].unique().item() == 1


def test_parameters_are_loaded_in_place(saved):
    parameter = torch.nn.Parameter(torch.zeros(5, 4))
    saved.load(2, {"model.a": parameter, "model.b": torch.zeros(())})
    assert parameter.detach().unique().item() == 2 and parameter.requires_grad


def test_only_complete_folders_with_exact_names_are_steps(saved):
    names = [
        "step-007",
        "step-8.bak",
        "step-9",
        "Step-10",
        "step-11 ",
        "step--12",
        "abandoned-step-13-0",
        "step-16x",
    ]
    for name in names:
        (saved.folder / name).mkdir()
        if name != "step-9":  # it lacks its manifest
            (saved.folder / name / "COMMIT.json").write_bytes(
                (saved.folder / "step-2" / "COMMIT.json").read_bytes()
            )
    (saved.folder / "step-14").write_text("a file")
    (saved.folder / "step-15").symlink_to(saved.folder / "step-1")
    assert saved.steps() == [1, 2]
    assert newest(saved) == 2
    assert checkpointer(saved.folder / "none").newest() is None


def test_retention_keeps_the_newest_and_touches_nothing_else(tmp_path):
    there = checkpointer(tmp_path / "checkpoint", keep_latest_k=2)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "train_state.json").write_text("{}")
    there.folder.mkdir()
    (there.folder / "step-0").symlink_to(elsewhere)
    (there.folder / "step-2").mkdir()
    (there.folder / "step-05").mkdir()
    for step in (10, 9, 100):
        there.save(step, tensors(step), {})
    assert there.steps() == [10, 100]
    there.save(3, tensors(3), {})
    assert there.steps() == [3, 100]
    assert sorted(os.listdir(there.folder)) == ["step-0", "step-05", "step-100", "step-2", "step-3"]
    assert (elsewhere / "train_state.json").exists()


def test_an_old_checkpoint_that_cannot_be_removed_does_not_fail_the_save(tmp_path, monkeypatch):
    said: list[str] = []
    there = checkpointer(tmp_path, keep_latest_k=1, say=said.append)
    there.save(1, tensors(1), {})

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folder.shutil, "rmtree", refuse)
    there.save(2, tensors(2), {})
    assert there.steps() == [2]
    assert said == [f"{tmp_path}: an old checkpoint could not be removed (Permission denied)"]
    monkeypatch.undo()
    there.save(3, tensors(3), {})
    assert os.listdir(tmp_path) == ["step-3"]


def test_a_step_saved_again_moves_the_first_one_aside(saved):
    for _ in range(2):
        saved.save(2, tensors(7), {})
    assert sorted(os.listdir(saved.folder)) == [
        "abandoned-step-2-0",
        "abandoned-step-2-1",
        "step-1",
        "step-2",
    ]
    target = tensors(0)
    saved.load(saved.folder / "abandoned-step-2-0", target)
    assert target["model.b"].item() == 2


def test_steps_after_one_that_is_gone_back_to_are_moved_aside(saved):
    saved.save(3, tensors(3), {})
    assert saved.set_newer_aside(1) == ["abandoned-step-2-0", "abandoned-step-3-0"]
    assert saved.steps() == [1]
    saved.save(2, tensors(2), {})
    assert saved.set_newer_aside(1) == ["abandoned-step-2-1"]
    assert saved.set_newer_aside(1) == []
