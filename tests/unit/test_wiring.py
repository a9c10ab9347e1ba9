"""Wiring: every named class is there and is built from the settings; children get their share."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from judged import serve_and_judge
from typer.testing import CliRunner

from online_sao import cli, wiring
from online_sao.config import Settings, load_settings
from online_sao.engines.embedded import __main__ as embedded_engine
from online_sao.engines.embedded import prepare
from online_sao.engines.scripted import ScriptedEngine
from online_sao.engines.scripted import __main__ as scripted_engine
from online_sao.errors import ConfigError, DatabaseRevisionError, ModelError
from online_sao.interfaces import Engine, Store, Trainer
from online_sao.learner.scripted import ScriptedTrainer
from online_sao.manifest import Manifest
from online_sao.store.memory import MemoryStore
from online_sao.types import VersionState

URL = "http://127.0.0.1:8123"


class Recorder:
    """A class of somebody else's: it remembers how it was made."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.args, self.options = args, options


def made(tmp_path: Path, **sections: dict[str, Any]) -> Settings:
    service = {"data": tmp_path / "data", **sections.pop("service", {})}
    return load_settings(overrides={"service": service, **sections}, environ={})


def scripted(tmp_path: Path, **sections: dict[str, Any]) -> Settings:
    return made(tmp_path, engine={"kind": "scripted"}, **sections)


# -- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dotted",
    [
        "no_such_module:Thing",
        "online_sao.types:NoSuchThing",
        "online_sao.types.deeper:Thing",
        "online_sao.types",
        "online_sao.types:",
        ":Thing",
        "",
        ".types:Thing",
    ],
)
def test_name_that_cannot_be_loaded_is_named_in_the_error(dotted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        wiring.load(dotted)
    assert f"`{dotted}`" in str(caught.value)


def test_name_of_somebody_elses_class_is_loaded() -> None:
    assert wiring.load(f"{__name__}:Recorder") is Recorder


def test_every_class_named_here_is_there_and_takes_what_it_is_given() -> None:
    inspect.signature(wiring.load(wiring.TRAINER)).bind("algorithm", "learner", "start policy")
    inspect.signature(wiring.load(wiring.STORE)).bind("url")
    inspect.signature(wiring.load(wiring.SCRIPTED_TRAINER)).bind()
    inspect.signature(wiring.load(wiring.ENGINE)).bind(
        URL, model="", swap_timeout_s=1, probe_tolerance=1, request_timeout_s=1
    )


# -- parts ---------------------------------------------------------------------------------------


async def test_store_is_sqlite_in_the_data_folder_unless_a_url_is_given(tmp_path: Path) -> None:
    settings = made(tmp_path)
    (tmp_path / "data").mkdir()
    assert wiring.database_url(settings) == f"sqlite:///{tmp_path}/data/online-sao.db"
    store = wiring.make_store(settings)
    assert isinstance(store, Store)
    with pytest.raises(DatabaseRevisionError, match="no database"):
        await store.open()
    await store.aclose()
    wiring.migrate(settings)
    store = wiring.make_store(settings)
    await store.open()
    assert (await store.ledger()).requests == 0
    await store.aclose()

    url = f"sqlite:///{tmp_path}/mine.db"
    given = made(tmp_path / "other", store={"url": url})
    assert wiring.database_url(given) == url
    wiring.migrate(given)
    store = wiring.make_store(given)
    await store.open()
    await store.aclose()
    assert (tmp_path / "mine.db").exists()
    assert not (tmp_path / "other").exists()


async def test_engine_client_gets_its_address_and_bounds_from_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = made(
        tmp_path,
        policy={"served_name": "mine"},
        publishing={"swap_timeout_s": 7.0, "probe_tolerance": 0.5},
        service={"request_timeout_s": 11.0},
    )
    engine = wiring.make_engine(settings, URL)
    assert isinstance(engine, Engine)
    await engine.aclose()
    monkeypatch.setattr(wiring, "ENGINE", f"{__name__}:Recorder")
    recorded: Any = wiring.make_engine(settings, URL)
    assert recorded.args == (URL,)
    assert recorded.options == {
        "model": "mine",
        "swap_timeout_s": 7.0,
        "probe_tolerance": 0.5,
        "request_timeout_s": 11.0,
    }


async def test_app_answers_over_its_engine_to_the_admin_key_alone(tmp_path: Path) -> None:
    settings = made(tmp_path, policy={"served_name": "mine"})
    app = wiring.make_app(settings, MemoryStore(), ScriptedEngine(version=5), "key")
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
        assert (await client.get("/v1/models")).status_code == 401
        answer = await client.get("/v1/models", headers={"authorization": "Bearer key"})
    (model,) = answer.json()["data"]
    assert (model["id"], model["sao"]["policy_version"]) == ("mine", 5)


async def test_publisher_prunes_the_data_folders_versions_by_the_settings(tmp_path: Path) -> None:
    settings = scripted(
        tmp_path,
        publishing={"keep_versions": 2},
        learner={"batch_size": 1},
        algorithm={"value_warmup_updates": 0},
    )
    await wiring.prepare_model(settings)
    model = tmp_path / "data" / "model"
    store = MemoryStore()
    await store.add_base_version(str(model), Manifest.read(model).sha256)
    learner = wiring.make_learner(settings, store, wiring.make_trainer(settings))
    publisher = wiring.make_publisher(settings, store, ScriptedEngine())
    await publisher.publish_once()
    assert await learner.turn()  # the first finds out where it stands
    for _ in range(4):
        await serve_and_judge(store, 1)
        assert await learner.turn()
        await publisher.publish_once()
    assert [v.number for v in await store.list_versions()] == [4, 3, 2, 1, 0]
    assert (await store.get_version(4)).state is VersionState.LIVE
    folders = {str(folder) for folder in (tmp_path / "data" / "versions").iterdir()}
    assert folders == {v.path for v in await store.list_versions() if v.number != 0}
    assert await publisher.prune() == [1, 2]


def test_trainer_is_the_scripted_one_for_the_scripted_engine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = wiring.make_trainer(scripted(tmp_path))
    assert isinstance(trainer, ScriptedTrainer)
    assert isinstance(trainer, Trainer)
    monkeypatch.setattr(wiring, "TRAINER", f"{__name__}:Recorder")
    for kind in ("embedded", URL):
        settings = made(tmp_path, engine={"kind": kind})
        recorded: Any = wiring.make_trainer(settings)
        assert recorded.args == (settings.algorithm, settings.learner, tmp_path / "data" / "model")


def test_rubric_is_the_configured_one(tmp_path: Path) -> None:
    rubric = wiring.load_rubric(made(tmp_path))
    assert rubric.name == "thumb_or_rules"
    assert rubric.judge.startswith("judges.")
    with pytest.raises(ConfigError, match="no-such-rubric"):
        wiring.load_rubric(made(tmp_path, judging={"rubric": "no-such-rubric"}))


# -- version 0 -----------------------------------------------------------------------------------


async def test_scripted_model_is_made_once_and_then_left_alone(tmp_path: Path) -> None:
    settings = scripted(tmp_path)
    model = tmp_path / "data" / "model"
    draft = tmp_path / "data" / "model.draft"
    draft.mkdir(parents=True)
    (draft / "config.json").write_text("{}")  # an attempt that was killed
    await wiring.prepare_model(settings)
    Manifest.read(model).verify(model)
    assert not draft.exists()
    before = (model / "manifest.json").stat().st_mtime_ns
    await wiring.prepare_model(settings)
    assert (model / "manifest.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("kind", ["scripted", "embedded"])
async def test_folder_in_the_models_place_that_is_no_model_is_refused_and_kept(
    tmp_path: Path, kind: str
) -> None:
    model = tmp_path / "data" / "model"
    model.mkdir(parents=True)
    (model / "precious.txt").write_text("mine")
    with pytest.raises(ModelError, match=str(model)):
        await wiring.prepare_model(made(tmp_path, engine={"kind": kind}))
    assert (model / "precious.txt").exists()


async def test_model_that_cannot_be_prepared_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def failing(settings: Settings, out: Path) -> list[str]:
        asked.append(out)
        return [sys.executable, "-c", "raise SystemExit(3)"]

    monkeypatch.setattr(wiring, "prepare_command", failing)
    settings = made(tmp_path, policy={"model": "no/such-model"})
    with pytest.raises(ModelError, match=r"no/such-model.*ONLINE_SAO_POLICY__MODEL"):
        await wiring.prepare_model(settings)
    assert asked == [tmp_path / "data" / "model"]


# -- children ------------------------------------------------------------------------------------


def test_engine_commands_are_understood_by_the_engines(tmp_path: Path) -> None:
    policy = {"max_model_len": 512, "served_name": "mine"}
    engine = {"dtype": "float32", "max_num_seqs": 3, "silence_s": 4.5}
    asked: dict[str, Any] = {"model": tmp_path, "version": 7, "port": 8123, "threads": 2}

    settings = made(tmp_path, policy=policy, engine=engine)
    python, m, module, *argv = wiring.engine_command(settings, **asked)
    assert (python, m, module) == (sys.executable, "-m", "online_sao.engines.embedded")
    args = embedded_engine._parser().parse_args(argv)
    assert (args.model, args.version, args.port, args.threads) == (tmp_path, 7, 8123, 2)
    assert (args.host, args.dtype, args.max_num_seqs) == ("127.0.0.1", "float32", 3)
    assert (args.max_model_len, args.served_name, args.silence_s) == (512, "mine", 4.5)

    settings = made(tmp_path, policy=policy, engine={**engine, "kind": "scripted"})
    python, m, module, *argv = wiring.engine_command(settings, **asked)
    assert (python, m, module) == (sys.executable, "-m", "online_sao.engines.scripted")
    args = scripted_engine._parser().parse_args(argv)
    assert (args.version, args.port, args.host) == (7, 8123, "127.0.0.1")
    assert (args.max_model_len, args.served_name, args.silence_s) == (512, "mine", 4.5)


def test_prepare_command_is_understood_by_the_preparation(tmp_path: Path) -> None:
    settings = made(
        tmp_path,
        policy={"model": "some/model", "max_model_len": 300},
        engine={"dtype": "float32"},
    )
    python, m, module, *argv = wiring.prepare_command(settings, tmp_path / "model")
    assert (python, m, module) == (sys.executable, "-m", "online_sao.engines.embedded.prepare")
    args = prepare._parser().parse_args(argv)
    assert (args.model, args.out) == ("some/model", tmp_path / "model")
    assert (args.max_model_len, args.dtype) == (300, "float32")


def test_several_ranks_are_started_by_torchrun_with_the_same_learner(tmp_path: Path) -> None:
    settings_file = tmp_path / "settings.toml"
    one = wiring.learner_command(settings_file)
    many = wiring.learner_command(settings_file, 3)
    assert many[1:3] == ["-m", "torch.distributed.run"]
    assert many[many.index("--nproc-per-node") + 1] == "3"
    assert many[-len(one) + 1 :] == one[1:]


def test_learner_command_is_understood_by_the_command_line(tmp_path: Path) -> None:
    python, m, module, *argv = wiring.learner_command(tmp_path / "missing.toml")
    assert (python, m, module) == (sys.executable, "-m", "online_sao")
    result = CliRunner().invoke(cli.app, argv)
    assert result.exit_code == 1
    assert "there is no settings file" in result.stderr  # so it is `learn` that read the option
    assert "missing.toml" in result.stderr


@pytest.mark.parametrize(
    ("cores", "engine", "learner", "expected"),
    [
        (1, 0, 0, (1, 1)),
        (2, 0, 0, (1, 1)),
        (3, 0, 0, (1, 2)),
        (8, 0, 0, (4, 4)),
        (8, 6, 0, (6, 2)),
        (8, 0, 2, (6, 2)),
        (8, 3, 2, (3, 2)),
        (2, 16, 0, (16, 1)),
        (2, 0, 16, (1, 16)),
    ],
)
def test_cores_are_split_as_the_settings_say_and_each_process_gets_at_least_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    engine: int,
    learner: int,
    expected: tuple[int, int],
) -> None:
    monkeypatch.setattr(wiring, "cores", lambda: cores)
    settings = made(tmp_path, engine={"threads": engine}, learner={"threads": learner})
    assert wiring.split_cores(settings) == expected


def test_child_gets_its_threads_and_none_of_our_settings_or_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ONLINE_SAO_ADMIN_KEY", "secret")
    monkeypatch.setenv("ONLINE_SAO_LEARNER__BATCH_SIZE", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setenv("SOMEBODY_ELSES", "kept")
    environment = wiring.child_environment(3, {"MALLOC_ARENA_MAX": "2"})
    assert not [name for name in environment if name.startswith("ONLINE_SAO_")]
    assert "secret" not in environment.values()
    assert environment["SOMEBODY_ELSES"] == "kept"
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.parametrize("variant", ["grpo", "grpo_dis", "spo"])
def test_a_service_refuses_a_variant_that_live_traffic_cannot_feed(
    tmp_path: Path, variant: str
) -> None:
    settings = made(tmp_path, algorithm={"variant": variant})
    with pytest.raises(ConfigError, match=f"{variant} .*online-sao ablate"):
        wiring.make_learner(settings, MemoryStore(), ScriptedTrainer())
    config = tmp_path / "s.toml"
    config.write_text(f'[algorithm]\nvariant = "{variant}"\n')
    data = tmp_path / "never"
    found = CliRunner().invoke(cli.app, ["up", "--config", str(config), "--data", str(data)])
    assert found.exit_code == 1
    assert "online-sao ablate" in found.stderr
    assert not data.exists()


@pytest.mark.parametrize("variant", ["sao", "vapo", "running_mean"])
def test_a_service_learns_with_variants_of_single_replies(tmp_path: Path, variant: str) -> None:
    wiring.check_live(made(tmp_path, algorithm={"variant": variant}))


def test_what_a_service_cannot_learn_with_is_said_at_its_start(tmp_path: Path) -> None:
    per_prompt = {"variant": "running_mean", "running_mean_per": "prompt"}
    with pytest.raises(ConfigError, match="running_mean_per = prompt"):
        wiring.check_live(made(tmp_path, algorithm=per_prompt))
    with pytest.raises(ConfigError, match="lora_rank"):
        wiring.check_live(made(tmp_path, learner={"ranks": 2, "lora_rank": 8}))
    rubric = tmp_path / "each.toml"
    rubric.write_text(
        'name = "each"\njudge = "judges.rules:RulesJudge"\nepisodes = "each"\n[criteria]\n'
    )
    judging = {"rubric": str(rubric)}
    wiring.check_live(made(tmp_path, judging=judging))
    with pytest.raises(ConfigError, match="one reward an episode"):
        wiring.check_live(made(tmp_path, judging=judging, algorithm={"variant": "running_mean"}))
