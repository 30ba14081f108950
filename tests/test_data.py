"""The proteins that TinyOpenFold learns from: synthetic ones, and real ones from files."""

from pathlib import Path

import gemmi
import numpy as np
import pytest
import torch
from conftest import ROOT, batches, words
from torch import Tensor

A3M, CIF = ROOT / "examples" / "bpti.a3m", ROOT / "examples" / "bpti.cif"
LETTERS = "ARNDCQEGHILKMFPSTWYV"  # AlphaFold's order of the amino acids; then unknown, gap and mask
UNKNOWN, GAP, MASK = 20, 21, 22
OPENFOLD = "tiny_openfold_v2"  # the other versions have the same data, which test_core.py shows


def synthetic(**sizes: int) -> dict[str, Tensor]:
    """The first batch of synthetic proteins of these sizes."""
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    return batches(OPENFOLD, *argv).next_batch()


def real(num_seqs: int, seq_len: int, batch_size: int) -> dict[str, Tensor]:
    """A batch of the example, which has 61 sequences and 58 residues."""
    argv = [f"--num-seqs={num_seqs}", f"--seq-len={seq_len}", f"--batch-size={batch_size}"]
    return batches(OPENFOLD, *argv, "--msa", str(A3M), "--structure", str(CIF)).next_batch()


def rows_of_example() -> list[str]:
    """The rows of the example alignment without their insertions, read in the plainest way."""
    records = A3M.read_text().split(">")[1:]
    rows = ["".join(record.splitlines()[1:]) for record in records]
    return ["".join(c for c in row if not c.islower()) for row in rows]


# Synthetic proteins


def test_chains_have_the_steps_and_bends_of_proteins():
    """3.8 Angstrom from residue to residue; two apart are 4.5 to 7.6, neither folded back nor all
    straight."""
    coords = synthetic(batch_size=32, seq_len=100)["coords"].double()
    steps = (coords[:, 1:] - coords[:, :-1]).norm(dim=-1)
    assert torch.allclose(steps, torch.full_like(steps, 3.8), atol=1e-3)
    distance = (coords[:, 2:] - coords[:, :-2]).norm(dim=-1)
    assert distance.min() > 4.5
    assert distance.max() < 7.6
    assert distance.std() > 0.3, "helices and strands must differ"
    assert synthetic()["observed"].all()


def test_fifteen_percent_of_the_alignment_is_masked_and_always_something():
    source = batches(OPENFOLD, "--num-seqs", "1", "--seq-len", "2", "--batch-size", "1")
    assert all(source.next_batch()["masked"].any() for _ in range(50))
    batch = synthetic(batch_size=16, num_seqs=32, seq_len=64)
    masked = batch["masked"]
    assert masked.float().mean().item() == pytest.approx(0.15, abs=0.01)
    assert (batch["tokens"][masked] == MASK).all()
    assert torch.equal(batch["tokens"][~masked], batch["true_tokens"][~masked])
    true_tokens = batch["true_tokens"]
    assert true_tokens.min() >= 0
    assert true_tokens.max() < MASK, "the truth is never the mask"
    assert not (true_tokens[:, 0] == GAP).any(), "the query has no gaps"
    for row in (0, 1, 31):
        assert 0.08 < masked[:, row].float().mean() < 0.22


def partners(coords: np.ndarray) -> list[tuple[int, int]]:
    """Pairs of residues that touch: nearest to each other, under 8 Angstrom, 3 or more apart in
    the chain."""
    distance = np.linalg.norm(coords[:, None] - coords, axis=-1)
    index = np.arange(len(coords))
    distance[np.abs(index[:, None] - index) < 3] = np.inf
    nearest = distance.argmin(1)
    pairs = [(i, j) for i, j in enumerate(nearest) if i < j and nearest[j] == i]
    return [pair for pair in pairs if distance[pair] < 8]


def test_touching_residues_mutate_together():
    """Whether a residue differs from the query's is correlated between partners and not between
    others."""
    batch = synthetic(batch_size=12, num_seqs=256, seq_len=48)
    touching, others, rng = [], [], np.random.default_rng(0)
    for tokens, coords in zip(batch["true_tokens"].numpy(), batch["coords"].numpy(), strict=True):
        mutated = np.where(tokens == GAP, np.nan, tokens != tokens[0])[1:]
        pairs = partners(coords)
        some = [(i, j) for i, j in rng.integers(48, size=(20, 2)) if i < j and (i, j) not in pairs]
        for chosen, result in ((pairs, touching), (some, others)):
            for i, j in chosen:
                both = ~np.isnan(mutated[:, i] + mutated[:, j])
                result.append(np.corrcoef(mutated[both, i], mutated[both, j])[0, 1])
    assert len(touching) > 40
    assert np.mean(touching) > 0.8
    assert abs(np.mean(others)) < 0.1


def test_crops_keep_alignment_and_structure_together():
    """Each sample is a window of the protein: query first, other rows without repetition, and
    the coordinates of it."""
    code = {c: token for token, c in enumerate(LETTERS)} | {"-": GAP}
    rows = [[code.get(c, UNKNOWN) for c in row] for row in rows_of_example()]
    whole, starts = real(61, 58, 1)["coords"][0], set()
    batch = real(num_seqs=8, seq_len=20, batch_size=16)
    assert not {"sequences", "residues"} & set(batch), "without padding there are no masks"
    for tokens, coords in zip(batch["true_tokens"].tolist(), batch["coords"], strict=True):
        start = next(s for s in range(39) if rows[0][s : s + 20] == tokens[0])
        starts.add(start)
        assert torch.equal(coords, whole[start : start + 20])
        windows = [row[start : start + 20] for row in rows[1:]]
        assert all(tokens[1:].count(row) <= windows.count(row) for row in tokens[1:])
    assert len(starts) > 1, "the window must move"


def expected_coordinates() -> np.ndarray:
    """C-beta, or C-alpha of glycine, of the example's 58 residues, in the first location where
    there are several."""
    chain = gemmi.read_structure(str(CIF))[0]["A"]
    residues = [residue for residue in chain.first_conformer() if residue.find_atom("CA", "*")]
    names = ["CA" if residue.name == "GLY" else "CB" for residue in residues]
    atoms = [r.find_atom(name, "*") for r, name in zip(residues, names, strict=True)]
    return np.array([atom.pos.tolist() for atom in atoms], dtype=np.float32)


def test_proteins_smaller_than_the_crop_are_padded(tmp_path: Path):
    """Here one of 10 sequences and 40 residues, in a folder, beside the whole example."""
    rows = enumerate(row[:40] for row in rows_of_example()[:10])
    (tmp_path / "a.a3m").write_text("".join(f">{i}\n{row}\n" for i, row in rows))
    structure = gemmi.read_structure(str(CIF))
    structure.remove_ligands_and_waters()
    del structure[0]["A"][40:]
    structure.setup_entities()
    structure.write_pdb(str(tmp_path / "a.pdb"))
    argv = words("--num-seqs 20 --seq-len 50 --batch-size 8")
    argv += ["--msa", str(A3M), "--structure", str(CIF)]
    argv += ["--msa", str(tmp_path), "--structure", str(tmp_path)]
    alone = batches(OPENFOLD, *argv, "--batch-size", "1")
    masks = ["residues" in alone.next_batch() for _ in range(9)]
    assert all(masks), "with a whole protein, too: a graph reads them in each step"
    batch = batches(OPENFOLD, *argv).next_batch()
    small = ~batch["residues"].all(1)
    assert 0 < small.sum() < 8, "crops of both"
    for name, size, whole in (("sequences", 10, 20), ("residues", 40, 50)):
        sizes = torch.where(small, size, whole)[:, None]
        assert torch.equal(batch[name], torch.arange(whole) < sizes), name
    there = batch["sequences"][:, :, None] & batch["residues"][:, None]
    assert (batch["true_tokens"][~there] == GAP).all()
    assert not batch["masked"][~there].any()
    assert not batch["observed"][small][:, 40:].any()
    found = batch["coords"][small][0, :40].numpy()
    np.testing.assert_allclose(found, expected_coordinates()[:40], atol=2e-3)
