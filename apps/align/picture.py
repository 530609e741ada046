"""The figure of a run: solved held-out prompts, rewards of sampled answers, the time of an iteration, and answers.

E evaluations, K iterations, M answers
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from hpcai.cli.report.picture import Finding, Table, arrays, format_measured
from hpcai.cli.report.theme import WIDTH, Theme, panel_title
from hpcai.errors import DataError

FILE = "answers.npz"
TITLE = "Answers to held-out prompts"
HIGHER = ("reward", "solved", "accuracy", "reward_margin")
PARTS = "generate", "score", "train"
LINES = (                                                # metrics of the training's reports
    ("reward", "reward", "Reward", "mean over sampled answers", "Of the answers that the steps used."),
    ("length", "length", "Length", "tokens of an answer", "Mean over sampled answers."),
    ("entropy", "entropy", "Entropy", "nats of a token", "Estimated by sampled tokens; 0: one answer to each prompt."),
    ("reference_kl_k3", "reference_kl", "Divergence from the reference", "nats of a token", "Schulman's estimator k3."),
    ("clipped_high", "clipped", "Clipped tokens", "fraction", "Good tokens without a gradient, since they became likelier."),
)


@dataclass
class Answers:
    """Evaluations of a run, its iterations, and answers."""

    evaluated: np.ndarray                                # [E, 2] step, fraction of solved prompts
    rewards: np.ndarray                                  # [K, 2] step, mean reward
    seconds: np.ndarray                                  # [K, 3] of the parts of an iteration; training: of the one before
    texts: list[list[str]]                               # [M] of three: prompt, answer, reward


def read(path: Path) -> Answers:
    content = arrays(path, {}, ("evaluated", "rewards", "seconds", "texts"))
    sizes = {"evaluated": 2, "rewards": 2, "seconds": 3, "texts": 3}
    for name, columns in sizes.items():
        if name not in content or content[name].ndim != 2 or content[name].shape[1] != columns:
            raise DataError(f"{name} is missing, or has not {columns} columns")
    if not len(content["evaluated"]):
        raise DataError("no evaluation, expected one or more")
    evaluated, rewards, seconds = (content[name].astype(float) for name in ("evaluated", "rewards", "seconds"))
    return Answers(evaluated, rewards, seconds, content["texts"].astype(str).tolist())


def caption(answers: Answers) -> str:
    text = "An answer to a held-out prompt solves it if its reward is 1 or more."
    if not len(answers.seconds):
        return text
    return f"{text} Answers are sampled, scored (rewards, reference, old probabilities), and trained on."


def finding(answers: Answers) -> Finding:
    first, last = answers.evaluated[0, 1], answers.evaluated[-1, 1]
    number = f"{format_measured(100 * last)} %"
    before = f", {format_measured(100 * first)} % at the first evaluation" if len(answers.evaluated) > 1 else ""
    return Finding(f"{number} of held-out prompts are solved{before}.", number, "solved held-out prompts; higher is better")


def draw(answers: Answers, theme: Theme) -> list[Figure]:
    figures = [Figure(figsize=(WIDTH, 3.4)) for _ in range(1 + bool(len(answers.seconds)))]
    axes = figures[0].subplots()
    if len(answers.rewards):
        axes.plot(*answers.rewards.T, color=theme.faint, label="reward of sampled answers")
    axes.plot(*answers.evaluated.T, color=theme.main, marker="o", markersize=4, label="solved held-out prompts")
    axes.set(xlabel="step", ylim=(min(0.0, float(answers.rewards[:, 1].min(initial=0.0))), 1.02))
    axes.legend(loc="lower right")
    panel_title(axes, "Solved prompts", f"{100 * answers.evaluated[-1, 1]:.0f} % of held-out prompts at the end", theme)
    if len(answers.seconds):
        totals = answers.seconds.sum(0)
        axes, shares = figures[1].subplots(), totals / max(totals.sum(), 1e-9)
        axes.barh(range(3), shares, height=0.6, color=[theme.main, theme.faint, theme.faint])
        for row, (share, seconds) in enumerate(zip(shares, totals)):
            axes.text(share, row, f" {100 * share:.0f} %, {seconds:.0f} s", va="center", color=theme.ink)
        axes.set_yticks(range(3), PARTS, color=theme.ink)
        axes.grid(False, axis="y")
        axes.set(xlabel="fraction of the time", xlim=(0, 1.15), ylim=(2.6, -0.6))
        panel_title(axes, "Time of an iteration", f"{shares[0]:.0%} is generation", theme)
    return figures


def table(answers: Answers) -> Table | None:
    if not answers.texts:
        return None
    note = "Held-out prompts, the answers at the last evaluation, and their rewards."
    return Table("Answers", note, ("prompt", "answer", "reward"), answers.texts, text=True)
