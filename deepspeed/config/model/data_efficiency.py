"""The ``data_efficiency`` block: curriculum sampling, token-budget batches, token dropping.

Keys that the format requires only once a feature is on have the default None here; the check is part of each block.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NewType

from pydantic import AfterValidator, Field, model_validator

from deepspeed.config.model.values import Count, Counts, Flag, FrozenDict, NestingBlock, PathText, Positive, Text

# The name of a difficulty measure, chosen by the user; the alias is how the key table writes it.
metric = NewType("metric", str)


class MetricScheduleConfig(NestingBlock):
    """``schedule_config`` of a curriculum metric; which keys it needs depends on ``schedule_type``. Lengths in
    steps.
    """

    total_curriculum_step: Positive | None = None
    difficulty_step: Positive | None = None
    root_degree: Positive | None = None
    difficulty: Counts | None = None
    max_step: Counts | None = None


_SCHEDULE_KEYS: Mapping[str, tuple[str, ...]] = FrozenDict(
    {
        "fixed_linear": ("total_curriculum_step", "difficulty_step"),
        "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
        "fixed_discrete": ("difficulty", "max_step"),
        "custom": (),
    }
)


class CurriculumMetricConfig(NestingBlock):
    """One measure of difficulty: where its index is and how the bar rises."""

    index_to_sample_path: PathText | None = None
    index_to_metric_path: PathText | None = None
    difficulty_type: Literal["value", "percentile"] | None = None
    clustering_type: Literal["schedule_based", "single_cluster"] | None = None
    min_difficulty: Count | None = None
    max_difficulty: Count | None = None
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] | None = None
    schedule_config: MetricScheduleConfig = Field(default_factory=MetricScheduleConfig)

    def missing(self) -> list[str]:
        """The keys without which this metric cannot be used."""
        wanted = ["difficulty_type", "clustering_type", "min_difficulty", "max_difficulty", "schedule_type"]
        if self.clustering_type != "single_cluster":
            wanted.append("index_to_sample_path")
            wanted += ["index_to_metric_path"] if self.difficulty_type == "value" else []
        out = [key for key in wanted if getattr(self, key) is None]
        schedule = _SCHEDULE_KEYS.get(self.schedule_type or "", ())
        return out + [f"schedule_config.{key}" for key in schedule if getattr(self.schedule_config, key) is None]


class CurriculumLearningConfig(NestingBlock):
    """``data_efficiency.data_sampling.curriculum_learning``: easy samples first."""

    required_if_enabled: ClassVar[tuple[str, ...]] = ("data_cluster_path", "curriculum_metrics")

    enabled: Flag = False
    data_cluster_path: PathText | None = None
    curriculum_metrics: Annotated[Mapping[metric, CurriculumMetricConfig], AfterValidator(FrozenDict)] = FrozenDict()

    @model_validator(mode="after")
    def _metrics_complete(self) -> Any:
        for name, item in self.curriculum_metrics.items() if self.enabled else ():
            if missing := item.missing():
                raise ValueError(f"has enabled true, and curriculum_metrics.{name} needs {', '.join(missing)}")
        return self


class DynamicBatchingConfig(NestingBlock):
    """``data_efficiency.data_sampling.dynamic_batching``: batches of up to ``max_tokens`` tokens; other sizes in
    samples.
    """

    required_if_enabled: ClassVar[tuple[str, ...]] = ("max_tokens",)

    enabled: Flag = False
    max_tokens: Positive | None = None
    lr_scaling_method: Literal["linear", "sqrt", "none"] = "linear"
    min_batch_size: Positive = 1
    max_batch_size: Positive | None = None
    sequence_picking_order: Literal["random", "seqlen", "dataloader"] = "dataloader"
    metrics_path: PathText | None = None
    verbose: Flag = False


class DataSamplingConfig(NestingBlock):
    """``data_efficiency.data_sampling``."""

    enabled: Flag = False
    num_epochs: Positive = 1000
    num_workers: Count = 0
    pin_memory: Flag = False
    curriculum_learning: CurriculumLearningConfig = Field(default_factory=CurriculumLearningConfig)
    dynamic_batching: DynamicBatchingConfig = Field(default_factory=DynamicBatchingConfig)


class LtdScheduleStepsConfig(NestingBlock):
    """``random_ltd_schedule.schedule_config``: steps until every token is kept, and tokens per increase."""

    require_steps: Positive | None = None
    seq_per_step: Positive | None = None


class LtdScheduleConfig(NestingBlock):
    """``random_ltd.random_ltd_schedule``: tokens kept at the start and at the end."""

    min_value: Positive | None = None
    max_value: Positive | None = None
    schedule_type: Literal["fixed_linear"] | None = None
    schedule_config: LtdScheduleStepsConfig = Field(default_factory=LtdScheduleStepsConfig)


class LayerTokenLrConfig(NestingBlock):
    """``random_ltd.layer_token_lr_schedule``: unfinished in the format itself."""

    enabled: Flag = False
    total_layer_tokens: Count | None = None
    warmup_type: Text | None = None
    warmup_layer_tokens: Count | None = None


class RandomLtdConfig(NestingBlock):
    """``data_efficiency.data_routing.random_ltd``: layers that skip a random part of the tokens."""

    required_if_enabled: ClassVar[tuple[str, ...]] = (
        "total_layer_num",
        "random_ltd_layer_num",
        "random_ltd_layer_id",
        "model_mask_name",
        "model_type",
        "hidden_state_order",
        "random_ltd_schedule",
    )

    enabled: Flag = False
    total_layer_num: Positive | None = None
    random_ltd_layer_num: Count | None = None
    random_ltd_layer_id: Counts | None = None
    model_mask_name: Text | None = None
    model_type: Literal["decoder", "encoder"] | None = None
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] | None = None
    random_ltd_schedule: LtdScheduleConfig = Field(default_factory=LtdScheduleConfig)
    layer_token_lr_schedule: LayerTokenLrConfig = Field(default_factory=LayerTokenLrConfig)


class DataRoutingConfig(NestingBlock):
    """``data_efficiency.data_routing``."""

    enabled: Flag = False
    random_ltd: RandomLtdConfig = Field(default_factory=RandomLtdConfig)


class DataEfficiencyConfig(NestingBlock):
    """``data_efficiency``."""

    enabled: Flag = False
    seed: Count = 1234
    data_sampling: DataSamplingConfig = Field(default_factory=DataSamplingConfig)
    data_routing: DataRoutingConfig = Field(default_factory=DataRoutingConfig)
