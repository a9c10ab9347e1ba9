"""Settings: sources in their order, unknown keys refused, presets as promised."""

from pathlib import Path

import pytest

from online_sao.config import SECTIONS, AlgorithmSettings, Settings, load_settings, to_toml
from online_sao.errors import ConfigError


def test_environment_wins_over_file_and_file_over_preset(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('preset = "interactive"\n[learner]\nbatch_size = 3\nmax_lag = 4\n')
    settings = load_settings(file, environ={"ONLINE_SAO_LEARNER__MAX_LAG": "5"})
    assert settings.learner.batch_size == 3
    assert settings.learner.max_lag == 5
    assert settings.algorithm.value_warmup_updates == 2


def test_command_line_wins_over_environment() -> None:
    environ = {"ONLINE_SAO_SERVICE__PORT": "1"}
    assert load_settings(None, {"service": {"port": 2}}, environ=environ).service.port == 2


def test_interactive_shows_the_first_version_after_24_judged_replies() -> None:
    settings = load_settings(preset="interactive", environ={})
    updates = settings.algorithm.value_warmup_updates + 1
    assert updates * settings.learner.batch_size == 24


def test_paper_preset_is_the_papers() -> None:
    settings = load_settings(preset="paper", environ={})
    algorithm, learner = settings.algorithm, settings.learner
    assert (algorithm.eps_low, algorithm.eps_high, algorithm.alpha) == (0.3, 5.0, 1.5)
    assert (algorithm.critic_updates, algorithm.value_warmup_updates) == (2, 10)
    assert (learner.policy_lr, learner.critic_lr, learner.batch_size) == (1e-6, 5e-6, 128)
    assert algorithm.kl_coef == 0.0


@pytest.mark.parametrize("preset", ["paper", "online", "interactive"])
def test_shown_settings_read_back_as_themselves(tmp_path: Path, preset: str) -> None:
    settings = load_settings(environ={"ONLINE_SAO_PRESET": preset})
    file = tmp_path / "shown.toml"
    file.write_text(to_toml(settings, comments=True))
    assert load_settings(file, environ={}) == settings


def test_windows_like_and_quoted_texts_survive_the_file(tmp_path: Path) -> None:
    settings = load_settings(None, {"policy": {"model": 'a\\b"c'}}, environ={})
    file = tmp_path / "s.toml"
    file.write_text(to_toml(settings))
    assert load_settings(file, environ={}).policy.model == 'a\\b"c'


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"ONLINE_SAO_LEARNER__BATCHSIZE": "3"}, "learner.batchsize"),
        ({"ONLINE_SAO_LERNER__BATCH_SIZE": "3"}, "lerner"),
        ({"ONLINE_SAO_LEARNER__BATCH_SIZE": "many"}, "learner.batch_size"),
        ({"ONLINE_SAO_LEARNER__BATCH_SIZE": "0"}, "learner.batch_size"),
        ({"ONLINE_SAO_PRESET": "fast"}, "preset"),
        ({"ONLINE_SAO_LEARNER": "3"}, "learner"),
    ],
)
def test_bad_setting_is_refused_by_its_name(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_settings(environ=environ)


def test_unknown_key_in_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text("[engine]\nkindd = 'scripted'\n")
    with pytest.raises(ConfigError, match=r"engine\.kindd"):
        load_settings(file, environ={})


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load_settings(tmp_path / "nowhere.toml", environ={})
    broken = tmp_path / "broken.toml"
    broken.write_text("[engine\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_settings(broken, environ={})


def test_admin_key_is_no_setting_and_is_never_shown() -> None:
    settings = load_settings(environ={"ONLINE_SAO_ADMIN_KEY": "sk-sao-secret"})
    assert "secret" not in to_toml(settings, comments=True)


def test_every_setting_says_what_it_does_and_where_it_comes_from() -> None:
    silent = [
        f"{section}.{name}"
        for section, model in SECTIONS.items()
        for name, field in model.model_fields.items()
        if not field.description
        or ("Source:" not in field.description and "paper" not in field.description)
    ]
    assert silent == []


def test_every_section_is_listed_once() -> None:
    assert set(SECTIONS) == set(Settings.model_fields) - {"preset"}


@pytest.mark.parametrize("side", ["eps_low", "eps_high"])
def test_a_band_with_one_side_names_the_missing_one(tmp_path: Path, side: str) -> None:
    other = {"eps_low": "eps_high", "eps_high": "eps_low"}[side]
    (tmp_path / "s.toml").write_text(f"[algorithm]\n{side} = 0.5\n")
    with pytest.raises(ConfigError, match=f"set {other} beside {side}"):
        load_settings(tmp_path / "s.toml", environ={})
    with pytest.raises(ConfigError, match=f"set {other} beside {side}"):
        load_settings(environ={f"ONLINE_SAO_ALGORITHM__{side.upper()}": "0.5"})
    both = load_settings(
        tmp_path / "s.toml", environ={f"ONLINE_SAO_ALGORITHM__{other.upper()}": "0.7"}
    ).algorithm
    assert {both.eps_low, both.eps_high} == {0.5, 0.7}


@pytest.mark.parametrize("alpha", ["0", "-1.5"])
def test_alpha_must_be_above_0(alpha: str) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.alpha"):
        load_settings(environ={"ONLINE_SAO_ALGORITHM__ALPHA": alpha})


def test_a_variant_changes_the_defaults_and_what_is_given_wins(tmp_path: Path) -> None:
    vapo = AlgorithmSettings(variant="vapo")
    assert (vapo.policy_loss, vapo.eps_low, vapo.eps_high) == ("ppo_clip", 0.2, 0.28)
    assert (vapo.critic_updates, vapo.critic_attention, vapo.has_critic) == (1, "trained", True)
    own = AlgorithmSettings(variant="vapo", critic_updates=3, eps_low=0.3, eps_high=5.0)
    assert (own.critic_updates, own.eps_low, own.eps_high) == (3, 0.3, 5.0)
    grpo = load_settings(environ={"ONLINE_SAO_ALGORITHM__VARIANT": "grpo"})
    assert (grpo.algorithm.eps_high, grpo.algorithm.has_critic) == (0.28, False)
    (tmp_path / "shown.toml").write_text(to_toml(grpo))
    assert load_settings(tmp_path / "shown.toml", environ={}) == grpo


def test_steps_have_no_observations_to_include() -> None:
    with pytest.raises(ConfigError, match="gae_observations = include"):
        load_settings(
            environ={
                "ONLINE_SAO_ALGORITHM__ACTION_LEVEL": "step_average",
                "ONLINE_SAO_ALGORITHM__GAE_OBSERVATIONS": "include",
            }
        )
