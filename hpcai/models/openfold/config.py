"""Settings of OpenFold, the AlphaFold 2 network for single chains, and its presets. Does not import torch."""

import json
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from hpcai.config import NonNegativeFloat, NonNegativeInt, PositiveInt, Rate, Settings, UnitInterval
from hpcai.errors import ConfigError

_PRESETS = json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))
"""settings of networks by name, without those that are the defaults"""


class PairConfig(Settings):
    """Sizes of the pair stack of a block."""

    triangle: PositiveInt = 128
    """channels of a triangle multiplication"""
    head: PositiveInt = 32
    """channels of a head of triangle attention"""
    heads: PositiveInt = 4
    transition: PositiveInt = 4
    """hidden width of the transition over its channels"""
    dropout: Rate = 0.25


class MsaConfig(Settings):
    """Sizes of the alignment stack of a block."""

    head: PositiveInt = 32
    heads: PositiveInt = 8
    outer: PositiveInt = 32
    """channels of the outer product's factors"""
    transition: PositiveInt = 4
    dropout: Rate = 0.15
    """rate after row attention; nothing else has dropout"""


class TemplateConfig(Settings):
    """Sizes of the template stack; templates are structures of homologs."""

    channels: PositiveInt = 64
    blocks: NonNegativeInt = 2
    pairs: PairConfig = PairConfig(triangle=64, head=16, heads=4, transition=2)
    head: PositiveInt = 16
    """channels of a head of the attention over templates"""
    heads: PositiveInt = 4


class ExtraConfig(Settings):
    """Rows of the alignment beyond the clusters."""

    channels: PositiveInt = 64
    blocks: NonNegativeInt = 4
    msa: MsaConfig = MsaConfig(head=8)
    pairs: PairConfig = PairConfig()


class StructureConfig(Settings):
    """Sizes of the structure module, which predicts atoms from pairs."""

    passes: PositiveInt = 8
    """iterations of the module, with shared weights"""
    head: PositiveInt = 16
    """scalar channels of a head of invariant point attention"""
    heads: PositiveInt = 12
    query_points: PositiveInt = 4
    value_points: PositiveInt = 8
    transition_layers: PositiveInt = 1
    angle: PositiveInt = 128
    """channels of the residual network for torsion angles"""
    angle_blocks: NonNegativeInt = 2
    dropout: Rate = 0.1


class HeadsConfig(Settings):
    """Sizes of the auxiliary heads."""

    plddt: PositiveInt = 128
    """hidden channels of the pLDDT head"""
    tm: bool = False
    """whether aligned errors of pairs are predicted, for pTM"""


class OpenFoldConfig(Settings):
    """The network of MLPerf HPC's OpenFold by default: 93,229,082 parameters."""

    msa: PositiveInt = 256
    """channels of the alignment"""
    pair: PositiveInt = 128
    single: PositiveInt = 384
    blocks: NonNegativeInt = 48
    """Evoformer blocks"""
    rows: MsaConfig = MsaConfig()
    pairs: PairConfig = PairConfig()
    extra: ExtraConfig = ExtraConfig()
    template: TemplateConfig | None = TemplateConfig()
    structure: StructureConfig = StructureConfig()
    heads: HeadsConfig = HeadsConfig()
    checkpoint: bool = False
    """activation checkpointing of the blocks: only their inputs are saved"""

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Return ``initial`` or ``finetuning`` (of training), ``model_1`` to ``model_5`` of AlphaFold (and ``_ptm``), or ``tiny``.
        """
        if name not in _PRESETS:
            raise ConfigError(f"there is no preset {name!r} of OpenFold; expected one of {', '.join(_PRESETS)}")
        return cls.model_validate(_PRESETS[name] | changes)


class ObjectiveConfig(Settings):
    """Weights of the terms of the loss. The defaults are those of initial training, in MLPerf HPC too."""

    fape: NonNegativeFloat = 1.0
    """frame-aligned point error: half for backbones in all passes, half for all atoms in the last"""
    chi: NonNegativeFloat = 1.0
    """torsion angles of side chains in all passes, and the norm of their vectors"""
    distogram: NonNegativeFloat = 0.3
    masked_msa: NonNegativeFloat = 2.0
    plddt: NonNegativeFloat = 0.01
    resolved: NonNegativeFloat = 0.0
    """experimentally resolved atoms; 0.01 in fine-tuning"""
    violation: NonNegativeFloat = 0.0
    """bonds, angles and clashes; 1 in fine-tuning"""
    aligned_error: NonNegativeFloat = 0.0
    """0.1 for a network with ``heads.tm``"""


class MaskConfig(Settings):
    """BERT-style masking. The remainder after the three replacements is replaced by the mask letter."""

    fraction: UnitInterval = 0.15
    """fraction of all letters of the clusters that is masked"""
    uniform: UnitInterval = 0.1
    """fraction replaced by any of the twenty residues"""
    profile: UnitInterval = 0.1
    """fraction replaced by a letter drawn from the profile of the column"""
    same: UnitInterval = 0.1
    """fraction left unchanged"""

    @model_validator(mode="after")
    def _at_most_all(self) -> Self:
        if self.uniform + self.profile + self.same > 1 + 1e-9:
            raise ValueError("uniform, profile and same are fractions, expected at most 1 in total")
        return self


class FeatureConfig(Settings):
    """Sizes of crops and alignments. Defaults are MLPerf HPC's; the public OpenFold trains with 128 clusters and 5 deleted blocks.
    """

    crop: PositiveInt | None = 256
    """residues of a crop, null for all; shorter chains are padded. 384 in fine-tuning, null in evaluation"""
    clusters: PositiveInt = 124
    """rows of the alignment in the main stack, besides those of templates; 508 in fine-tuning"""
    extra: NonNegativeInt = 1024
    """further rows of the alignment; 5120 in fine-tuning"""
    templates: NonNegativeInt = 4
    """maximum number of templates"""
    torsions: bool = True
    """whether torsion angles of templates are features"""
    recycles: NonNegativeInt = 3
    """maximum number of recycles, one less than passes"""
    mask: MaskConfig = MaskConfig()
    clamped: UnitInterval = 0.9
    """fraction of training samples with a clamped backbone error"""
    deleted_blocks: NonNegativeInt = 0
    """blocks of neighbouring rows that are deleted from the alignment in training"""
    deleted_share: Rate = 0.3
    """fraction of all rows in one such block"""
