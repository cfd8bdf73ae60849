"""The training loop. It knows tasks, states and run folders, not what is trained.

Order of initialisation: the run's own newest checkpoint, then `train.init_from`, then scratch.
"""

import contextlib
import json
import signal
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import ProjectConfiguration, broadcast_object_list
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..attention import QKVAttention
from ..config import Config, TrainConfig, differences
from ..data.latents import LatentShards, PositionOrder, flips
from ..errors import Interrupted, NonFinite
from ..files import available_cores, write_text
from ..processes import check_process_count, without_accelerator
from ..progress import progress
from ..runs import RunFolder, Weights, build_network, find_weights, objective_of, read_weights
from ..sampling import balanced_labels, check_sampling, generate, image_grid
from ..vae import Codec, codec_of
from .ema import averages
from .optim import build_optimizer, learning_rate
from .state import TrainState, load_checkpoint, remove_unfinished, save_checkpoint
from .tasks import GenerationTask


def start_accelerator(config: TrainConfig) -> Accelerator:
    """The Accelerator of this process; ValueError if it does not see as many processes as were started."""
    accelerator = Accelerator(
        cpu=without_accelerator(),
        mixed_precision=config.mixed_precision,
        log_with=None if config.tracker == "none" else config.tracker,
        project_dir=".",  # until the run folder is known
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
    )
    check_process_count(accelerator.num_processes)
    if accelerator.num_processes > 1:  # of the depthwise convolution's weights, (C, 1, k, k): the two layouts are one in memory
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise ValueError("mixed precision fp16 needs an accelerator; on a CPU use no or bf16")
    if accelerator.num_processes == 1 and accelerator.device.type == "cpu":
        # accelerate launch sets one thread; alone on a machine without an accelerator, all cores are ours
        torch.set_num_threads(config.num_threads or available_cores())
    return accelerator


@dataclass(frozen=True)
class BatchPlan:
    """How a global batch is split: micro-step m of process r takes one contiguous slice of positions.

    `first_position` is the position of step 0. It is 0 unless the batch size was changed on resume: the stream then
    goes on where it was, no position twice and none left out.
    """

    batch_size: int
    micro_batch: int
    num_processes: int
    first_position: int = 0

    @classmethod
    def of(cls, config: TrainConfig, num_processes: int) -> "BatchPlan":
        share, rest = divmod(config.batch_size, num_processes)
        if rest:
            raise ValueError(f"train.batch_size {config.batch_size} is not divisible by the {num_processes} processes")
        micro = config.micro_batch or share
        if share % micro:
            raise ValueError(f"train.micro_batch {micro} does not divide the {share} images a process takes of train.batch_size")
        return cls(config.batch_size, micro, num_processes)

    @property
    def accumulation(self) -> int:
        return self.batch_size // (self.micro_batch * self.num_processes)

    def positions(self, step: int, micro_step: int, rank: int) -> np.ndarray:
        """Global positions (micro_batch,) of one forward pass."""
        start = self.position(step) + (micro_step * self.num_processes + rank) * self.micro_batch
        return np.arange(start, start + self.micro_batch)

    def position(self, step: int) -> int:
        """The first position of a step; so many images were consumed before it."""
        return self.first_position + step * self.batch_size

    def resumed(self, step: int, position: int) -> "BatchPlan":
        """This plan, going on at `step` from `position`."""
        return replace(self, first_position=position - step * self.batch_size)


def check_config(config: Config, num_processes: int, *, begins: bool) -> None:
    """ValueError for what a resolved config cannot do; called before a run folder is made.

    `begins` is false for a run that is resumed, which ignores train.init_from: that file may be gone by then.
    """
    BatchPlan.of(config.train, num_processes)
    check_sampling(config.sample, objective_of(config), config.model)
    if begins and config.train.init_from:
        _load_initial(build_network(config), config)


def train(config: Config, run: RunFolder, shards: LatentShards, accelerator: Accelerator) -> None:
    """Train a resolved config in its locked run folder, from its newest checkpoint to train.steps."""
    t = config.train
    plan = BatchPlan.of(t, accelerator.num_processes)

    network = build_network(config)
    checkpoint = _agree(accelerator, lambda: run.latest_checkpoint())
    if checkpoint is None and t.init_from:
        accelerator.print(_load_initial(network, config))
    task = GenerationTask(network, objective_of(config), config.data.latent, label_dropout=t.label_dropout, seed=config.seed)
    task.to(accelerator.device)
    emas = averages(network, t)
    averaged = {kind: ema.network for kind, ema in emas.items()}
    if t.compile:
        network.compile()
    wrapped, optimizer = accelerator.prepare(task, build_optimizer(network, t))
    first_step = 0
    if checkpoint is not None:
        saved = load_checkpoint(checkpoint, network=network, averages=averaged, optimizer=optimizer.optimizer)
        first_step = saved.step
        plan = plan.resumed(saved.step, saved.position)
        _restore_scale(accelerator, saved)
        accelerator.print(_resume_line(checkpoint, saved, _state(accelerator, plan, saved.step)))
    if accelerator.is_main_process:
        remove_unfinished(run)
        _drop_log_after(run, first_step)
    if checkpoint is not None and first_step >= t.steps:
        accelerator.print(f"{run.path} is finished: {first_step} of {t.steps} steps are done; raise train.steps to go on")
        return
    accelerator.print(_start_line(config, plan, network, accelerator))
    monitor = Monitor(accelerator, run, config, plan, first_step)
    codec = _codec_for_previews(config, accelerator) if accelerator.is_main_process else None

    def save(step: int) -> None:
        monitor.raise_if_bad(step)
        if accelerator.is_main_process:
            save_checkpoint(
                run, config, _state(accelerator, plan, step), network=network, averages=averaged, optimizer=optimizer.optimizer
            )
        accelerator.wait_for_everyone()

    if t.steps == 0:  # the initial weights, as a model to compare with
        save(0)
        return
    batches = _batches(shards, task, config, plan, accelerator.process_index, first_step)
    with SignalWatch(accelerator.num_processes) as watch, contextlib.closing(batches), monitor:
        for step in range(first_step, t.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(t, step)
            for micro_step in range(plan.accumulation):
                stored, y, draws = _to_device(next(batches), accelerator.device)
                last = micro_step + 1 == plan.accumulation
                with contextlib.nullcontext() if last else accelerator.no_sync(wrapped):
                    terms = {name: term.mean() for name, term in wrapped(stored, y, draws).items()}
                    accelerator.backward(sum(terms.values()) / plan.accumulation)
                monitor.add(terms)
            accelerator.unscale_gradients()
            norm = _clip(network, t.clip_grad)
            bad = monitor.check(step, norm, scaled=accelerator.scaler is not None)
            if accelerator.scaler is None:
                optimizer.optimizer.found_inf = bad.float()  # fused AdamW leaves weights and state as they are where it is 1
            optimizer.step()
            optimizer.zero_grad()
            done = step + 1
            for ema in emas.values():
                ema.update(done, skip=bad)
            monitor.step(done, learning_rate(t, step))
            stop = watch.agreed()
            if done % t.save_every == 0 or done == t.steps or stop:
                save(done)
            if done == t.steps or (t.sample_every and done % t.sample_every == 0):
                if codec is not None:
                    _preview(run, config, averaged["ema"], codec, done)
                accelerator.wait_for_everyone()
            if stop:
                raise Interrupted(stop)


class Monitor:
    """Losses, speed and finiteness, kept on the device and read only at log intervals and before a save."""

    def __init__(self, accelerator: Accelerator, run: RunFolder, config: Config, plan: BatchPlan, first_step: int):
        self.accelerator, self.run, self.config, self.plan = accelerator, run, config, plan
        device = accelerator.device
        self._sums: dict[str, Tensor] = {}
        self._last: dict[str, Tensor] = {}
        self._bad_terms: dict[str, Tensor] = {}
        self._norm = torch.zeros((), device=device)
        self._bad_step = torch.full((), -1, dtype=torch.long, device=device)
        self._steps_summed = 0
        self._clock = time.perf_counter()
        self._bar = progress(config.train.steps, "step", "train", initial=first_step, disable=not accelerator.is_main_process)

    def __enter__(self) -> "Monitor":
        if self.accelerator.log_with:
            self.accelerator.project_configuration = ProjectConfiguration(project_dir=str(self.run.path))
            self.accelerator.init_trackers("tracker")
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()
        self.accelerator.end_training()

    def add(self, terms: dict[str, Tensor]) -> None:
        """The mean terms of one micro-batch of this process."""
        for name, term in terms.items():
            self._last[name] = self._last.get(name, 0) + term.detach().float() / self.plan.accumulation

    def check(self, step: int, norm: Tensor, *, scaled: bool) -> Tensor:
        """A boolean on the device: was this step, or one before it, not finite? The first bad step is remembered.

        From the first bad step on nothing changes until the flag is read. With loss scaling an infinite gradient is
        the scaler's ordinary business and only the loss counts.
        """
        loss = sum(self._last.values())
        if scaled and self.accelerator.num_processes > 1:
            loss = self.accelerator.reduce(loss, "mean")
        healthy = torch.isfinite(loss) if scaled else torch.isfinite(norm)
        first = ~healthy & (self._bad_step < 0)
        self._bad_step = torch.where(first, step, self._bad_step)
        for name, value in self._last.items():
            self._bad_terms[name] = torch.where(first, value, self._bad_terms.get(name, torch.zeros_like(value)))
            self._sums[name] = self._sums.get(name, 0) + value
        self._norm = self._norm + norm
        self._last = {}
        return self._bad_step >= 0

    def raise_if_bad(self, step: int) -> None:
        """Read the flag (a sync)."""
        bad_step = int(self._bad_step)
        if bad_step < 0:
            return
        terms = ", ".join(f"{name} {float(value):g}" for name, value in self._bad_terms.items())
        first = self.plan.position(bad_step)
        raise NonFinite(
            f"loss or gradient is not finite at step {bad_step} ({terms} in this process), positions {first} to "
            f"{first + self.plan.batch_size - 1}; no weight was changed since. Try a lower train.lr, train.clip_grad, or "
            "mixed_precision no; a checkpoint before it is good"
        )

    def step(self, done: int, lr: float) -> None:
        """After an optimizer step: every log_every steps, and at the last, read and write the figures."""
        self._bar.update(1)
        self._steps_summed += 1
        if done % self.config.train.log_every and done != self.config.train.steps:
            return
        self.raise_if_bad(done)
        means = self._means()
        now = time.perf_counter()
        images_per_s = self._steps_summed * self.plan.batch_size / (now - self._clock)
        self._clock, self._steps_summed, self._sums = now, 0, {}
        self._norm = torch.zeros_like(self._norm)
        record = {"step": done, "images": self.plan.position(done), **means, "lr": lr, "images_per_s": round(images_per_s, 2)}
        self.accelerator.log({k: v for k, v in record.items() if k != "step"}, step=done)
        if self.accelerator.is_main_process:
            self._bar.set_postfix_str(f"loss {means['loss']:.4f}, {images_per_s:.0f} images/s", refresh=False)
            with open(self.run.log_file, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def _means(self) -> dict[str, float]:
        names = list(self._sums)
        values = torch.stack([self._sums[name] for name in names]) / self._steps_summed
        values = self.accelerator.reduce(values, "mean").tolist()
        means = dict(zip(names, values, strict=True))
        return {"loss": sum(values), **means, "grad_norm": float(self._norm) / self._steps_summed}


class SignalWatch:
    """Turns SIGTERM and Ctrl-C into a request to save and leave after the current step; a second one acts at once.

    Several processes must stop at the same step: each step starts a reduction of what they received, on the host, and
    reads that of the step before, so that nobody waits for it and the device is not asked.
    """

    def __init__(self, num_processes: int):
        self._received = 0
        self._previous = {}
        self._group = torch.distributed.new_group(backend="gloo") if num_processes > 1 else None
        self._pending: tuple[Tensor, torch.distributed.Work] | None = None

    def __enter__(self) -> "SignalWatch":
        with contextlib.suppress(ValueError):  # not the main thread: signals are somebody else's
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._pending and kind in (None, Interrupted):  # all processes leave here; after a fault the others may not come
            self._pending[1].wait()

    def _note(self, number, frame) -> None:
        self._received = number
        signal.signal(number, self._previous[number])

    def agreed(self) -> int:
        """The signal to stop for, or 0; the same in all processes. Call it once a step."""
        if self._group is None:
            return self._received
        last, received = self._pending, torch.tensor([self._received])
        work = torch.distributed.all_reduce(received, torch.distributed.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = received, work
        if last is None:
            return 0
        last[1].wait()
        return int(last[0])


def _batches(
    shards: LatentShards, task: GenerationTask, config: Config, plan: BatchPlan, rank: int, first_step: int
) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """This process's micro-batches from `first_step` on, each prepared on the host while the one before it is used."""
    order = PositionOrder(len(shards), config.seed)

    def prepare(step: int, micro_step: int):
        positions = plan.positions(step, micro_step, rank)
        flipped = flips(config.seed, positions) if config.data.flip else np.zeros(len(positions), dtype=bool)
        return (*shards.rows(order.indices(positions), flipped), task.draw(positions))

    keys = ((step, micro) for step in range(first_step, config.train.steps) for micro in range(plan.accumulation))
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        pending = None
        for key in keys:
            following = pool.submit(prepare, *key)
            if pending is not None:
                yield pending.result()
            pending = following
        yield pending.result()


def _to_device(batch, device: torch.device):
    """Times stay on the host in float64; the rest moves without waiting."""
    stored, y, draws = batch

    def move(tensor: Tensor) -> Tensor:
        if device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    return move(stored), move(y), {name: d if name == "t" else move(d) for name, d in draws.items()}


def _clip(network: torch.nn.Module, max_norm: float) -> Tensor:
    """Clip the gradients to a total norm (0: do not), and return the norm before, on the device."""
    parameters = [p for p in network.parameters() if p.grad is not None]
    norm = get_total_norm([p.grad for p in parameters])
    if max_norm:
        clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _load_initial(network: torch.nn.Module, config: Config) -> str:
    """Start from a weight file. Returns a line that says what did not come from it.

    A label table of another size keeps its new initial values, and a position embedding that of its own grid. A softmax
    model may become one of another attention: what that has besides is set by `start_from_softmax`.
    """
    weights = read_weights(find_weights(config.train.init_from))
    tensors, own = dict(weights.tensors), network.state_dict()
    said = f"starting from {weights.path} (step {weights.step}, {weights.kind} weights)"
    _check_initial(weights, config)
    if _grid_differs(tensors, own):
        tensors["pos_embed"] = own["pos_embed"]
        said += (
            f"; the position embedding is computed for latents of side {config.model.input_size}, that file is of side "
            f"{weights.config.model.input_size}"
        )
    table = "y_embedder.embedding_table.weight"
    if table in own and (table not in tensors or tensors[table].shape != own[table].shape):
        rows = len(tensors[table]) - 1 if table in tensors else 0
        tensors[table] = own[table]
        said += f"; a new label table for {config.model.num_classes} classes, that file has {rows}"
    elif table in tensors and table not in own:
        del tensors[table]
        said += "; its label table is dropped, this model has no classes"
    if changed := differences(weights.config.objective, config.objective):
        shown = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items())
        said += f"; it was trained for another objective ({shown})"
    theirs, ours = weights.config.model.attention.name, config.model.attention.name
    converted = theirs == "softmax" and ours != "softmax"
    if converted:
        added = {name for name in own if ".attn." in name and name not in tensors}
        tensors |= {name: own[name] for name in added}
        said += f"; softmax attention becomes {ours}, with {len(added)} new tensors"
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(
            f"train.init_from {weights.path} does not fit this model: {' '.join(str(error).split())[:300]}"
        ) from error
    for module in network.modules() if converted else ():
        if isinstance(module, QKVAttention):
            module.start_from_softmax()
    network.origin = weights.origin  # checkpoints carry it on
    return said


def _check_initial(weights: Weights, config: Config) -> None:
    """ValueError for a weight file of another function than this model's that its tensors would not tell apart."""
    theirs, ours = weights.config.model, config.model
    if theirs.patch_size != ours.patch_size:
        raise ValueError(
            f"train.init_from {weights.path} has patches of side {theirs.patch_size}, this model {ours.patch_size}: the first "
            f"and the last layer are made for one patch size, only the latent size may differ; set model.patch_size "
            f"{theirs.patch_size}"
        )
    if theirs.time_freqs != ours.time_freqs:
        raise ValueError(
            f"train.init_from {weights.path} was trained with other frequencies of the time embedding: set model.time_freqs "
            f"{theirs.time_freqs}"
        )
    for name in ("dim", "depth", "num_heads", "mlp_ratio", "learn_sigma", "in_channels"):
        if getattr(theirs, name) != getattr(ours, name):
            raise ValueError(
                f"train.init_from {weights.path} does not fit this model: model.{name} is {getattr(theirs, name)} there and "
                f"{getattr(ours, name)} here"
            )
    if theirs.attention.name not in ("softmax", ours.attention.name):
        raise ValueError(
            f"train.init_from {weights.path} does not fit this model: it has {theirs.attention.name} attention, this model "
            f"{ours.attention.name}; only a softmax model becomes one of another attention"
        )


def _grid_differs(tensors: dict[str, Tensor], own: dict[str, Tensor]) -> bool:
    """Whether position embeddings (1, N, dim) of one width have different numbers of tokens."""
    shapes = [state["pos_embed"].shape if "pos_embed" in state else () for state in (tensors, own)]
    return all(len(shape) == 3 for shape in shapes) and shapes[0][1] != shapes[1][1] and shapes[0][2] == shapes[1][2]


def _agree(accelerator: Accelerator, decide):
    """The main process decides, all take its answer."""
    answer = [decide() if accelerator.is_main_process else None]
    return broadcast_object_list(answer)[0]


def _state(accelerator: Accelerator, plan: BatchPlan, step: int) -> TrainState:
    return TrainState(
        step=step,
        position=plan.position(step),
        loss_scale=accelerator.scaler.get_scale() if accelerator.scaler else None,
        num_processes=plan.num_processes,
        micro_batch=plan.micro_batch,
        num_threads=torch.get_num_threads(),
        precision=accelerator.mixed_precision,
        device=accelerator.device.type,
    )


def _restore_scale(accelerator: Accelerator, saved: TrainState) -> None:
    if accelerator.scaler is not None and saved.loss_scale is not None:
        accelerator.scaler.update(saved.loss_scale)


def _resume_line(checkpoint, saved: TrainState, now: TrainState) -> str:
    """Says from where, and names what changed of that on which the last bits depend."""
    changed = [
        f"{name} {getattr(saved, name)} -> {getattr(now, name)}"
        for name in ("num_processes", "micro_batch", "num_threads", "precision", "device")
        if getattr(saved, name) != getattr(now, name)
    ]
    note = f" (equal except by rounding: {', '.join(changed)})" if changed else ""
    return f"resuming from {checkpoint} at step {saved.step}{note}"


def _start_line(config: Config, plan: BatchPlan, network: torch.nn.Module, accelerator: Accelerator) -> str:
    parameters = sum(p.numel() for p in network.parameters())
    return (
        f"{config.preset or 'run'}: {parameters:,} parameters, {config.model.attention.name} attention, "
        f"{config.data.num_images} images, batch {plan.batch_size} = {plan.num_processes} processes x {plan.micro_batch} "
        f"x {plan.accumulation} micro-steps, {accelerator.device.type}, precision {accelerator.mixed_precision}, "
        f"{torch.get_num_threads()} threads"
    )


def _drop_log_after(run: RunFolder, step: int) -> None:
    """Lines of steps that will be taken again go; the log then reads as if the run had never been interrupted."""
    if run.log_file.is_file():
        kept = []
        for line in run.log_file.read_text().splitlines():
            with contextlib.suppress(ValueError, KeyError):  # a line cut short by a kill
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
        write_text(run.log_file, "".join(kept))


def _codec_for_previews(config: Config, accelerator: Accelerator) -> Codec | None:
    """What decodes the previews, opened before the first step; training itself needs no VAE and goes on without one."""
    try:
        return codec_of(config.data.latent, accelerator.device)
    except (ValueError, OSError) as error:
        print(f"warning: there will be no previews: {' '.join(str(error).split())}")
        return None


def _preview(run: RunFolder, config: Config, network: torch.nn.Module, codec: Codec, step: int) -> None:
    """A grid of images from the EMA weights: 8 a row, the classes in turn."""
    from PIL import Image

    labels = balanced_labels(32, config.model.num_classes)
    images = torch.cat(
        list(generate(network, objective_of(config), codec, config.sample, labels=labels, seed=config.seed, tile=32))
    )
    run.samples.mkdir(exist_ok=True)
    Image.fromarray(image_grid(images, 8).numpy()).save(run.samples / f"{step:07d}-preview.png")
