"""Settings: a TOML file, `ONLINE_SAO_*` in the environment over it, a preset under both.

Order, the first that names a key wins: command line, environment
(`ONLINE_SAO_LEARNER__BATCH_SIZE=32`), the file (`[learner] batch_size = 32`), the preset, the
default. An unknown key anywhere is an error. Each field says what it does and where its default
comes from.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from online_sao.errors import ConfigError

PresetName = Literal["paper", "online", "interactive"]
ENV_PREFIX = "ONLINE_SAO_"
ENV_ADMIN_KEY = "ONLINE_SAO_ADMIN_KEY"
"""Read by `up` and `serve` alone; a secret, so never a setting that `config show` prints."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServiceSettings(_Section):
    """The HTTP service."""

    host: str = Field("127.0.0.1", description="Address to bind. Source: loopback until told else.")
    port: int = Field(8000, ge=0, le=65535, description="Port to bind; 0 picks one. Source: habit.")
    data: Path = Field(
        Path("data"), description="Data folder: database, model, versions, key. Source: ours."
    )
    max_body_bytes: int = Field(
        4 << 20, ge=1024, description="Larger request bodies get 413 unread. Source: 128k tokens."
    )
    max_in_flight: int = Field(
        256, ge=1, description="Chats at once; beyond it 429 with retry-after. Source: ours."
    )
    request_timeout_s: float = Field(
        600.0, gt=0, description="Longest a reply may take (s). Source: the OpenAI SDK's default."
    )
    drain_s: float = Field(
        30.0, ge=0, description="On SIGTERM, how long replies may finish (s). Source: Kubernetes."
    )


class PolicySettings(_Section):
    """The model that is served and trained."""

    model: str = Field(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        description="A local folder, a model an installed package carries, or a hub name, looked "
        "for in that order. Source: smallest real chat model under Apache-2.0.",
    )
    served_name: str = Field("online-sao", description="The `model` clients ask for. Source: ours.")
    max_model_len: int = Field(
        2048, ge=16, description="Context length (tokens), prompt and reply. Source: CPU memory."
    )
    default_max_tokens: int = Field(
        0,
        ge=0,
        description="Longest reply (tokens) where a client names no max_tokens; 0: what the "
        "context holds, as OpenAI does. Source: a small model at temperature 1 rambles on.",
    )


class EngineSettings(_Section):
    """The serving engine."""

    kind: str = Field(
        "embedded",
        description="`embedded`, `scripted`, `vllm`, or the http URL of a running server. "
        "Source: works on any machine.",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto",
        description="auto: bfloat16 where the hardware computes in it. Source: measured "
        "2-3 times faster with AMX.",
    )
    max_num_seqs: int = Field(
        32, ge=1, description="Replies decoded at once; more wait. Source: decode benchmark."
    )
    threads: int = Field(
        0,
        ge=0,
        description="CPU threads; 0 lets `up` split the cores. Source: two torch "
        "processes on all cores each ran 10-50 times slower.",
    )
    silence_s: float = Field(
        30.0,
        gt=0,
        description="A paused engine goes on by itself after this silence of its "
        "controller (s). Source: ours.",
    )


class StoreSettings(_Section):
    """The database."""

    url: str = Field(
        "", description="SQLAlchemy URL; empty: SQLite in the data folder. Source: needs nothing."
    )


class JudgingSettings(_Section):
    """How replies get their reward."""

    rubric: str = Field(
        "thumb_or_rules",
        description="A shipped rubric's name or a TOML file's path. A changed file becomes a new "
        "rubric version at start. Source: works with and without users who rate.",
    )
    feedback_wait_s: float = Field(
        60.0,
        ge=0,
        description="How long a rubric that wants the user's thumb waits for it (s). "
        "Source: ours; no thumb is no reward, never 0.",
    )
    concurrency: int = Field(
        4, ge=1, description="Judgements at once. Source: GLM-4.7's observed limits, 1-10."
    )
    timeout_s: float = Field(
        60.0, gt=0, description="Longest one judgement may take (s). Source: ours."
    )
    max_attempts: int = Field(
        5, ge=1, description="Failed looks before a rollout is given up as expired. Source: ours."
    )
    episode_idle_s: float = Field(
        600.0,
        gt=0,
        description="A tool episode that nobody closes is closed after so long without a request "
        "(s). Source: the longest a reply may take.",
    )


VARIANTS: dict[str, dict[str, Any]] = {
    "sao": {},
    "running_mean": {},
    "grpo": {"policy_loss": "ppo_clip", "eps_low": 0.2, "eps_high": 0.28},
    "grpo_dis": {},
    "vapo": {
        "policy_loss": "ppo_clip",
        "eps_low": 0.2,
        "eps_high": 0.28,
        "critic_updates": 1,
        "critic_attention": "trained",
        "critic_embeddings": "trained",
    },
    "spo": {},
}
"""What each variant changes of the other keys' defaults; keys that are given win."""
CRITIC_VARIANTS = ("sao", "vapo")
"""The variants whose baseline is a critic."""
LIVE_VARIANTS = (*CRITIC_VARIANTS, "running_mean")
"""The variants that live traffic can feed: the others need prompts that come again."""


class AlgorithmSettings(_Section):
    """SAO and what it is compared with. Letters as in `online_sao/algorithm/README.md`."""

    variant: Literal["sao", "running_mean", "grpo", "grpo_dis", "vapo", "spo"] = Field(
        "sao",
        description="sao, or a method it is compared with; changes the defaults of other keys. "
        "grpo, grpo_dis and spo need prompts that come again: `online-sao ablate` alone. "
        "Source: paper.",
    )
    policy_loss: Literal["dis", "unmasked", "ppo_clip"] = Field(
        "dis",
        description="dis: eq. 1 with the band of eq. 3; unmasked: without it; ppo_clip: PPO's "
        "one-sided clip. Source: paper.",
    )
    eps_low: float = Field(0.3, gt=0, description="Band of eq. 3, low side. Source: paper, TIR.")
    eps_high: float = Field(5.0, gt=0, description="Band of eq. 3, high side. Source: paper, TIR.")
    alpha: float = Field(
        1.5, gt=0, description="lambda = 1 - 1/(alpha l), l action tokens. Source: paper."
    )
    gamma: float = Field(1.0, gt=0, le=1, description="Discount. Source: paper.")
    critic_updates: int = Field(
        2, ge=1, description="K, critic updates per policy update. Source: paper."
    )
    value_warmup_updates: int = Field(
        10, ge=0, description="Live batches that train the critic alone first. Source: paper."
    )
    value_pretrain_rollouts: int = Field(
        0,
        ge=0,
        description="Judged rollouts the critic is fitted on before all else; the policy "
        "never trains on them. Source: paper scales it with the corpus at hand.",
    )
    critic_attention: Literal["frozen", "trained"] = Field(
        "frozen", description="Attention modules of the critic. Source: paper."
    )
    critic_embeddings: Literal["frozen", "trained"] = Field(
        "frozen", description="Token embeddings and MoE routers of the critic. Source: ours."
    )
    gae_observations: Literal["skip", "include"] = Field(
        "skip",
        description="Observation tokens between a trajectory's actions: skipped by the "
        "GAE, or links of its chain. Source: paper (skip).",
    )
    action_level: Literal["token", "step_average", "step_last_token"] = Field(
        "token",
        description="What is one action of the GAE: a token, or a whole turn with the mean or "
        "the last of its tokens' values. Source: paper, A.1.",
    )
    running_mean_window: int = Field(
        128, ge=1, description="running_mean: rewards in the mean. Source: paper; 8 per prompt."
    )
    running_mean_per: Literal["all", "prompt"] = Field(
        "all", description="running_mean: one mean, or one per prompt. Source: paper has both."
    )
    group_size: int = Field(
        8, ge=2, description="grpo, grpo_dis: replies to one prompt in a group. Source: paper."
    )
    spo_half_life: float = Field(
        0.1,
        gt=0,
        description="spo: drift KL(then||now) per token (nats) that halves a prompt's counts. "
        "Source: ours.",
    )
    value_head: Literal["linear", "sigmoid"] = Field(
        "linear", description="linear: squared error (paper); sigmoid: bounded, cross-entropy."
    )
    advantage_critic: Literal["before", "after"] = Field(
        "before",
        description="Critic used for advantages, before or after its K updates on the "
        "batch. Source: ours; no difference on the prototype.",
    )
    loss_mean: Literal["token", "trajectory"] = Field(
        "token",
        description="E_t of eq. 1: over the batch's action tokens, or per trajectory "
        "first. Source: paper / named choice.",
    )
    kl_coef: float = Field(
        0.2,
        ge=0,
        description="Weight of KL(policy || start) per token. Source: 0.2 recovered "
        "from a shift where 0.1 did not; paper: 0.",
    )
    kl_direction: Literal["policy_start", "start_policy"] = Field(
        "policy_start",
        description="Which KL: KL(policy||start) or KL(start||policy). Source: ours.",
    )
    entropy_coef: float = Field(0.0, ge=0, description="Weight of an entropy bonus. Source: ours.")
    cut_replies: Literal["train", "skip"] = Field(
        "train",
        description="Replies cut at max_tokens: trained with their judged reward, or "
        "discarded. Source: ours; else running on is never punished.",
    )

    @property
    def has_critic(self) -> bool:
        """Whether the baseline is a critic; without one there is no pretraining or warm-up."""
        return self.variant in CRITIC_VARIANTS

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_variant(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        sides = [side for side in ("eps_low", "eps_high") if side in given]
        if len(sides) == 1:
            missing = "eps_low" if sides == ["eps_high"] else "eps_high"
            raise ValueError(f"the band has two sides, and neither implies the other: set {missing}"
                             f" beside {sides[0]}")  # fmt: skip
        return {**VARIANTS.get(str(given.get("variant", "sao")), {}), **given}

    @model_validator(mode="after")
    def _one_kind_of_chain(self) -> Self:
        if self.action_level != "token" and self.gae_observations == "include":
            raise ValueError(
                "gae_observations = include goes with action_level = token: between steps there "
                "are no observations"
            )
        return self


class LearnerSettings(_Section):
    """The learner process."""

    batch_size: int = Field(
        16,
        ge=1,
        description="Trajectories per update. Source: 128 in the "
        "paper at 30B; 16 measured on SmolLM2.",
    )
    policy_lr: float = Field(
        3e-5,
        gt=0,
        description="Source: measured on SmolLM2 (3e-4 collapses "
        "in one update); paper 1e-6 at 30B.",
    )
    critic_lr: float = Field(1e-4, gt=0, description="Source: measured on SmolLM2; paper 5e-6.")
    ranks: int = Field(
        1,
        ge=1,
        description="Processes that share one learner, each with a GPU of its own; its layers are "
        "cut up over them (FSDP2). Source: the weights should fit one GPU until they do not.",
    )
    policy_layers: int = Field(
        10, ge=0, description="Train the top N layers of the policy; 0: all. Source: measured."
    )
    lora_rank: int = Field(
        0,
        ge=0,
        description="Train adapters of this rank on the linear layers of those N layers instead "
        "of the layers themselves; 0: off. Source: ours; memory. Wants a higher policy_lr.",
    )
    lora_alpha: int = Field(
        0,
        ge=0,
        description="Adapters' scale is lora_alpha / lora_rank; 0: twice the rank. Source: "
        "Biderman et al. 2024 (arXiv 2405.09673) found 2 to be good at any rank.",
    )
    critic_layers: int = Field(
        6, ge=0, description="Keep the first N layers for the critic; 0: all. Source: measured."
    )
    grad_clip: float = Field(1.0, gt=0, description="Gradient norm, both networks. Source: ours.")
    adam_eps: float = Field(
        1e-5, gt=0, description="Source: with 1e-8 a run of all-zero rewards drifted to garbage."
    )
    max_lag: int = Field(
        8,
        ge=0,
        description="Published versions a rollout may be old when "
        "claimed; beyond it discarded as stale. Source: ours.",
    )
    max_train_tokens: int = Field(
        1024,
        ge=2,
        description="Longer trajectories are discarded as too_long. Source: memory on 2 cores.",
    )
    micro_batch_tokens: int = Field(
        2048, ge=1, description="Padded tokens per forward pass. Source: update benchmark."
    )
    activation_checkpointing: bool = Field(
        False, description="Recompute activations: less memory, 25 % slower. Source: measured."
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="Compute dtype; masters stay fp32. Source: AMX is 2-3 times faster."
    )
    threads: int = Field(
        0, ge=0, description="CPU threads; 0 lets `up` split the cores. Source: as the engine's."
    )
    lease_s: float = Field(
        120.0,
        gt=0,
        description="A silent learner's rollouts go back after "
        "this (s); renewed while it works. Source: ours.",
    )
    state_every: int = Field(
        0,
        ge=0,
        description="Full state every N updates; 0: as often as "
        "costs under 10 % of the time. Source: ours.",
    )

    def check_ranks(self, ranks: int) -> None:
        """Raises ConfigError for what so many processes cannot share."""
        if ranks > 1 and self.lora_rank > 0:
            raise ConfigError("learner.lora_rank goes with one process: set it to 0, or ranks to 1")


class PublishingSettings(_Section):
    """How new weights reach the engine."""

    swap_timeout_s: float = Field(
        30.0, gt=0, description="Longest one swap may take (s). Source: vLLM's /pause took 6.6."
    )
    probe_tolerance: float = Field(
        0.35,
        gt=0,
        description="Largest allowed |log-probability error| of a probe token (nats). "
        "Source: bf16 engines differ by up to 0.27; a stale tied head is caught by larger errors.",
    )
    keep_versions: int = Field(
        4,
        ge=2,
        description="Version folders kept beside the live one. Source: disk.",
    )


class RetentionSettings(_Section):
    """How long content is kept; the counts stay."""

    text_days: float = Field(
        30.0,
        gt=0,
        description="Messages, replies and token traces older than this are dropped "
        "(days). Source: ours.",
    )


SECTIONS: dict[str, type[_Section]] = {
    "service": ServiceSettings,
    "policy": PolicySettings,
    "engine": EngineSettings,
    "store": StoreSettings,
    "judging": JudgingSettings,
    "algorithm": AlgorithmSettings,
    "learner": LearnerSettings,
    "publishing": PublishingSettings,
    "retention": RetentionSettings,
}

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "paper": {
        "algorithm": {"kl_coef": 0.0, "value_warmup_updates": 10},
        "learner": {
            "batch_size": 128,
            "policy_lr": 1e-6,
            "critic_lr": 5e-6,
            "policy_layers": 0,
            "critic_layers": 0,
            "max_train_tokens": 131072,
        },
    },
    "online": {},
    "interactive": {
        "policy": {"default_max_tokens": 256},
        "judging": {"feedback_wait_s": 20.0},
        "algorithm": {"value_warmup_updates": 2},
        "learner": {"batch_size": 8},
    },
}
"""What each preset changes of the defaults. `online` is the defaults."""


class Settings(BaseSettings):
    """All settings, resolved."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True
    )

    preset: PresetName = Field(
        "online", description="`paper`, `online` or `interactive`. Source: measured on SmolLM2."
    )
    service: ServiceSettings = ServiceSettings()
    policy: PolicySettings = PolicySettings()
    engine: EngineSettings = EngineSettings()
    store: StoreSettings = StoreSettings()
    judging: JudgingSettings = JudgingSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    learner: LearnerSettings = LearnerSettings()
    publishing: PublishingSettings = PublishingSettings()
    retention: RetentionSettings = RetentionSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The merged mapping alone: `load_settings` has put the sources in their order."""
        return (init_settings,)


def load_settings(
    file: Path | None = None,
    overrides: dict[str, dict[str, Any]] | None = None,
    *,
    preset: PresetName | None = None,
    environ: dict[str, str] | None = None,
) -> Settings:
    """Settings from all sources. Raises ConfigError naming every bad key, one line each."""
    from_file = _read_toml(file) if file is not None else {}
    from_env = _read_environ(dict(os.environ) if environ is None else environ)
    chosen = preset or from_env.get("preset") or from_file.get("preset") or "online"
    merged: dict[str, Any] = {"preset": chosen}
    for source in (PRESETS.get(str(chosen), {}), from_file, from_env, overrides or {}):
        for key, value in source.items():
            if key == "preset":
                continue
            if isinstance(value, dict) and isinstance(merged.get(key, {}), dict):
                merged[key] = {**merged.get(key, {}), **value}
            else:
                merged[key] = value
    try:
        return Settings(**merged)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def to_toml(settings: Settings, *, comments: bool = False) -> str:
    """The settings as a TOML file that gives them back; with `comments`, each one's sentence."""
    lines = [f'preset = "{settings.preset}"']
    for section, model in SECTIONS.items():
        lines += ["", f"[{section}]"]
        values = getattr(settings, section)
        for name, field in model.model_fields.items():
            if comments and field.description:
                lines.append(f"# {field.description}")
            lines.append(f"{name} = {_toml_value(getattr(values, name))}")
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"there is no settings file {file}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from None


def _read_environ(environ: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable == ENV_ADMIN_KEY:
            continue
        section, _, key = variable.removeprefix(ENV_PREFIX).lower().partition("__")
        if not key:
            found[section] = text
        else:
            found.setdefault(section, {})[key] = text
    return found


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown setting `{key}` (see `online-sao config show`)")
        else:
            lines.append(f"setting `{key}`: {problem['msg'].removeprefix('Value error, ')}")
    return "; ".join(lines)
