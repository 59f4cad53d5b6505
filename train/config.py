"""Typed settings of training. Imports no torch, so that a typo fails at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..models.config import DecisionConfig, check_choice, check_positive


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """AdamW and its schedule.

    schedule: `cosine`, `linear`, `constant`, or `wsd` (warm-up, stable, then linear decay over the last
        `decay_ratio` of the steps). All rise linearly over the first `warmup_ratio` of the steps, and the
        falling ones end at `min_lr_ratio` of the learning rate.
    head_lr: learning rate of parameters whose name starts with `head.` (None: `lr` for all).
    weight_decay: decoupled decay; norms, biases and other vectors never decay.
    max_grad_norm: gradients of a larger total L2 norm are scaled down to it.
    """

    lr: float = 2e-4
    head_lr: float | None = None
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    schedule: str = "cosine"
    warmup_ratio: float = 0.05
    decay_ratio: float = 0.2
    min_lr_ratio: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        check_choice("optim.schedule", self.schedule, ("cosine", "linear", "constant", "wsd"))
        check_positive("optim.lr", self.lr)
        check_positive("optim.head_lr", self.head_lr)
        check_positive("optim.eps", self.eps)
        check_positive("optim.max_grad_norm", self.max_grad_norm)
        if self.weight_decay < 0:
            raise ValueError(f"optim.weight_decay={self.weight_decay} must be 0 or more")
        for key in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, key) < 1.0:
                raise ValueError(f"optim.{key}={getattr(self, key)} must be in [0, 1)")
        for key in ("warmup_ratio", "decay_ratio", "min_lr_ratio"):
            if not 0.0 <= getattr(self, key) <= 1.0:
                raise ValueError(f"optim.{key}={getattr(self, key)} must be between 0 and 1")
        if self.schedule == "wsd" and self.warmup_ratio + self.decay_ratio > 1.0:
            raise ValueError(
                f"optim.warmup_ratio={self.warmup_ratio} and optim.decay_ratio={self.decay_ratio} "
                "must not be more than 1 together"
            )


@dataclass(kw_only=True, slots=True)
class LoopConfig:
    """How long, how much at once, and how often things happen (0 = never).

    batch_size: rows of one optimiser step over *all* ranks and microbatches.
    max_tokens: token budget of one microbatch on one rank; larger is faster until memory ends.
    save_every: steps between checkpoints (the last step is always saved); more often loses less work to a
        crash and spends more time writing.
    keep_checkpoints: how many of the newest stay on disk, besides the best one.
    best_metric: name of the evaluated number that picks the best checkpoint ("" picks none).
    """

    seed: int = 0
    max_steps: int = 100
    batch_size: int = 8
    max_tokens: int = 4096
    log_every: int = 1
    eval_every: int = 0
    save_every: int = 50
    keep_checkpoints: int = 2
    best_metric: str = ""
    best_mode: str = "max"

    def __post_init__(self) -> None:
        for key in ("max_steps", "batch_size", "max_tokens", "keep_checkpoints"):
            check_positive(f"loop.{key}", getattr(self, key))
        for key in ("seed", "log_every", "eval_every", "save_every"):
            if getattr(self, key) < 0:
                raise ValueError(f"loop.{key}={getattr(self, key)} must be 0 or more")
        check_choice("loop.best_mode", self.best_mode, ("max", "min"))


@dataclass(kw_only=True, slots=True)
class RuntimeConfig:
    """Where it runs.

    num_processes: how many ranks were asked for; a launcher that started another number is refused
        (None takes what the launcher gives, and says so).
    mixed_precision: `auto` computes in bf16 on CUDA, and on a CPU only if the parameters are bf16.
    threads: CPU threads of each rank (None leaves PyTorch's own choice).
    activation_checkpointing: recompute activations in the backward pass: about a third more time, far less memory.
    """

    device: str = "auto"
    mixed_precision: str = "auto"
    num_processes: int | None = None
    threads: int | None = None
    compile: bool = False
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        check_choice("runtime.device", self.device, ("auto", "cpu", "cuda"))
        check_choice("runtime.mixed_precision", self.mixed_precision, ("auto", "no", "bf16"))
        check_positive("runtime.num_processes", self.num_processes)
        check_positive("runtime.threads", self.threads)


@dataclass(kw_only=True, slots=True)
class TrackerConfig:
    """Where numbers go besides `log.jsonl`, which is always written."""

    wandb: bool = False
    project: str = "retrail"
    mode: str = "offline"

    def __post_init__(self) -> None:
        check_choice("tracker.mode", self.mode, ("online", "offline"))


@dataclass(kw_only=True, slots=True)
class FitConfig:
    """Everything that `train.loop.fit` is told besides the model, the objective and the run folder."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)


@dataclass(kw_only=True, slots=True)
class DecisionObjectiveConfig:
    """How slates are drawn for training, and what is minimised.

    teacher: who says what is right: `labels`, the judgements of the data, or `likelihood`, the untrained model's own
        log p(query | candidate): no judgement is read, every query of the split counts, and a step takes a further pass
        of the teacher over each query and candidate (see `train/objectives/distil.py`).
    teacher_temperature: what the teacher's gains (nats a query token) are divided by to be log-odds; higher teaches
        more of the order below the best, and less sure answers.
    teacher_yes: the gain at which its answer turns from no to yes; a lower one says yes to more candidates.
    min_candidates, max_candidates: a slate's size is drawn uniformly between them.
    queries: how many queries ask about one slate at most, each with its own right node there; more learn more a token,
        and take decision.order=candidates_first. `random_share` then is the share of their nodes that are not hard.
    sibling_share: of the rivals, how many share the gold's parent (the rest are cross-page).
    random_share: of the slates, how many take random rivals instead of hard ones (easy first steps, no popularity).
    trained_level: only nodes below those of this level (0 is the root level) that a training query leads to are shown
        (null: all nodes). Where the split divides the nodes of a level, a model that sees those of the test
        queries as wrong answers only learns to refuse them.
    easy_rows: from easy to hard: over the first so many slates of a data set (steps times loop.batch_size) the random
        share goes in a straight line from `first_random_share` to `random_share` (0: no such start). A longer start is
        safer for a model that knows nothing yet, and leaves fewer steps for what searches go wrong on.
    first_random_share: see `easy_rows`.
    rivals: what finds hard rivals: `bm25`, `dense` (MiniLM; a further minute or more before the first step), or files
        of rankings of the training queries (`run.trec` or `hits.jsonl` of `retrail eval`), whose nodes also stand for
        what is above them. Several take turns: more kinds of mistakes, fewer of each.
    rival_ranks: first and last rank that is taken of each; a later start is less hard, with fewer right answers
        that nobody judged.
    walks: files of `retrail walks`: what an earlier model's own search judged for training queries.
    own_share: of the slates of queries with walks, how many show what their search judged; more trains on what a
        search meets, and less on the rest of the corpus.
    none_share: of the slates, how many hold no right candidate ("none of these").
    choice_weight: weight of the multiple-choice question; it costs a second forward pass (yes/no head only).
    level_weights: what a slate of each level counts in every term, root level first, the last repeating. Heavier upper
        levels keep the gold path longer at the price of the order of the leaves; only their ratios matter.
    positive_weights: how often a right candidate counts in `bce`, by level likewise. Above 1 buys recall with
        confidence: P(yes) rises everywhere, its odds by up to this factor.
    none_weight: weight of the choice between all candidates and none-of-these, which is right on slates without a right
        candidate. It weighs the log-odds of a slate together, which binary cross-entropy, that trains the same log-odds
        one by one, does not; a yes/no head is asked one more question for it, which costs another forward pass.
    """

    teacher: str = "labels"
    teacher_temperature: float = 0.1
    teacher_yes: float = 0.8
    min_candidates: int = 6
    max_candidates: int = 12
    queries: int = 1
    trained_level: int | None = None
    sibling_share: float = 0.5
    random_share: float = 0.5
    easy_rows: int = 0
    first_random_share: float = 1.0
    rivals: list[str] = field(default_factory=lambda: ["bm25"])
    rival_ranks: list[int] = field(default_factory=lambda: [1, 30])
    walks: list[str] = field(default_factory=list)
    own_share: float = 0.5
    none_share: float = 0.05
    bce_weight: float = 1.0
    listwise_weight: float = 1.0
    choice_weight: float = 0.5
    level_weights: list[float] = field(default_factory=lambda: [1.0])
    positive_weights: list[float] = field(default_factory=lambda: [1.0])
    none_weight: float = 0.0

    def __post_init__(self) -> None:
        self._check_teacher()
        self._check_weights()
        if not 1 <= self.min_candidates <= self.max_candidates:
            raise ValueError(
                f"objective.min_candidates={self.min_candidates} must be between 1 and "
                f"objective.max_candidates={self.max_candidates}"
            )
        if self.queries < 1:
            raise ValueError(f"objective.queries={self.queries} must be 1 or more")
        if self.trained_level is not None and self.trained_level < 0:
            raise ValueError(f"objective.trained_level={self.trained_level} must be 0 or more, or null")
        for key in ("sibling_share", "random_share", "first_random_share", "own_share", "none_share"):
            if not 0.0 <= getattr(self, key) <= 1.0:
                raise ValueError(f"objective.{key}={getattr(self, key)} must be between 0 and 1")
        if self.easy_rows < 0:
            raise ValueError(f"objective.easy_rows={self.easy_rows} must be 0 or more")
        if len(self.rival_ranks) != 2 or not 1 <= self.rival_ranks[0] <= self.rival_ranks[1]:
            raise ValueError(f"objective.rival_ranks={self.rival_ranks} must be a first and a last rank, from 1")

    def _check_teacher(self) -> None:
        check_choice("objective.teacher", self.teacher, ("labels", "likelihood"))
        check_positive("objective.teacher_temperature", self.teacher_temperature)
        if self.teacher == "likelihood":
            for key, plain in (("none_weight", 0.0), ("positive_weights", [1.0])):
                if getattr(self, key) != plain:
                    raise ValueError(
                        f"objective.{key}={getattr(self, key)} needs labels; set it to {plain} with "
                        "objective.teacher=likelihood"
                    )

    def _check_weights(self) -> None:
        for key in ("level_weights", "positive_weights"):
            values = getattr(self, key)
            if not values or not all(0.0 < value < float("inf") for value in values):
                raise ValueError(f"objective.{key}={values} must list at least one number, each above 0")

    def check_fits(self, decision: DecisionConfig) -> None:
        """Raise ValueError where the model that these slates train could not be shown them."""
        if self.max_candidates > decision.max_candidates:
            raise ValueError(
                f"objective.max_candidates={self.max_candidates} is more than decision.max_candidates="
                f"{decision.max_candidates}, the most that a search puts on a slate; lower the first or raise "
                "the second"
            )
        if self.queries > 1 and decision.order != "candidates_first":
            raise ValueError(
                f"objective.queries={self.queries} queries cannot share a slate that begins with the query; set "
                "decision.order=candidates_first or objective.queries=1"
            )


@dataclass(kw_only=True, slots=True)
class StateObjectiveConfig:
    """What a state encoder is trained on, and what is minimised.

    temperature: of InfoNCE; lower looks at the hardest negatives alone.
    margin: a negative whose similarity is above that of the positive by more than this is left out, as it looks like
        another right one (null: none is). It needs a model that ranks well already: another one would learn nothing
        from what it gets most wrong.
    negatives: wrong documents a state at most, 0 to 7; more make a harder loss and longer batches.
    recovery_share: the share of hops that also have a state whose last document is wrong.
    random_share: of these, the share whose wrong document is any of the corpus, and not one that looks right.
    hop_weights: what the state of each hop counts, the first hop first, the last repeating.
    recovery_weight: what a recovery state counts in its place.
    states_too, documents_too: states, and the positives' rivals, among the negatives (the query-query and
        document-document terms of Qwen3-Embedding).
    dimensions: also train the first so many dimensions by themselves (Matryoshka), each counting as much as all; []
        none. A shorter vector then keeps more of its worth.
    paraphrases: draw among all wordings of the instructions; false trains the one that is searched with.
    rivals: what finds wrong documents besides those of the data: `bm25`, or files of rankings of the training queries.
    rival_ranks: first and last rank that is taken of each; a later start is less hard, with fewer unjudged right ones.
    picks: files of rankings by the model's own search, whose wrong documents recovery states have observed.
    """

    temperature: float = 0.05
    margin: float | None = None
    negatives: int = 3
    recovery_share: float = 0.3
    random_share: float = 0.15
    hop_weights: list[float] = field(default_factory=lambda: [1.0])
    recovery_weight: float = 1.0
    states_too: bool = False
    documents_too: bool = False
    dimensions: list[int] = field(default_factory=list)
    paraphrases: bool = True
    rivals: list[str] = field(default_factory=lambda: ["bm25"])
    rival_ranks: list[int] = field(default_factory=lambda: [1, 50])
    picks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_positive("contrast.temperature", self.temperature)
        check_positive("contrast.recovery_weight", self.recovery_weight)
        if not 0 <= self.negatives <= 7:
            raise ValueError(f"contrast.negatives={self.negatives} must be between 0 and 7")
        for key in ("recovery_share", "random_share"):
            if not 0.0 <= getattr(self, key) <= 1.0:
                raise ValueError(f"contrast.{key}={getattr(self, key)} must be between 0 and 1")
        if not self.hop_weights or not all(0.0 < value < float("inf") for value in self.hop_weights):
            raise ValueError(f"contrast.hop_weights={self.hop_weights} must list at least one number, each above 0")
        if any(size < 1 for size in self.dimensions):
            raise ValueError(f"contrast.dimensions={self.dimensions} must list numbers of 1 or more")
        if len(self.rival_ranks) != 2 or not 1 <= self.rival_ranks[0] <= self.rival_ranks[1]:
            raise ValueError(f"contrast.rival_ranks={self.rival_ranks} must be a first and a last rank, from 1")
