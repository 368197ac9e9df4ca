"""The KroneckerTerms format: a sum of Kronecker products, the form of frozen attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._format import LinearFormat, Operator
from tnlib._stored_arrays import as_stored, refuse_too_large, set_fields
from tnlib._typing import Array
from tnlib._validate import as_list, to_numpy
from tnlib.formats.matrix.low_rank import LowRank
from tnlib.formats.matrix.matrix_sums import Factors, gram_factor, rescale_terms
from tnlib.linalg.orthogonal import r_factor
from tnlib.linalg.scaling import Scaled


@dataclass(frozen=True, eq=False, repr=False)
class KroneckerTerms(LinearFormat, Operator):
    r"""The operator :math:`\sum_h A_h \otimes B_h`, acting on arrays x of shape (positions, features).

    :math:`(A \otimes B) x = A x B^T`; on x flattened row by row it is the matrix kron(A, B). Sums, products, multiples
    and adjoints are of the same form: :math:`(A_2 \otimes B_2)(A_1 \otimes B_1) = A_2 A_1 \otimes B_2 B_1`, so a
    product has a term for every pair. `tnlib.round` computes the fewest terms.

    Parameters
    ----------
    left
        (H, p, p'), one matrix :math:`A_h` per term on the positions.
    right
        H matrices :math:`B_h` (q, q') on the features, arrays or `LowRank`.

    References
    ----------
    C. F. Van Loan, N. Pitsianis, "Approximation with Kronecker products", Linear Algebra for Large Scale and Real-Time
    Applications (1993).

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> ones = tnlib.LowRank(np.ones((4, 1)), np.ones((1, 4)))
    >>> k = tnlib.KroneckerTerms(np.eye(3)[None], [ones])
    >>> k.shape, k.n_parameters, float(k.apply(np.ones((3, 4)))[0, 0])
    ((12, 12), 17, 4.0)
    """

    left: Array
    right: Sequence[Array | LowRank]

    def __post_init__(self) -> None:
        left = as_stored("KroneckerTerms", "left", self.left, ndim=3)
        right = tuple(
            term if isinstance(term, LowRank) else as_stored("KroneckerTerms", f"right {h}", term, ndim=2)
            for h, term in enumerate(as_list("KroneckerTerms", "right", self.right, "matrices"))
        )
        if len(left) != len(right):
            raise ArgumentError(
                f"KroneckerTerms: left and right must have as many terms, got {len(left)} and {len(right)}; "
                "pass one matrix on each side per term."
            )
        for h, term in enumerate(right):
            if term.shape != right[0].shape:
                raise ArgumentError(
                    f"KroneckerTerms: all right matrices must have one shape, got {right[0].shape} for term 0 and "
                    f"{term.shape} for term {h}; pad them."
                )
        set_fields(self, left=left, right=right)

    def named_arrays(self) -> dict[str, Array]:
        """Return left, then the arrays of every right matrix."""
        named = {"left": self.left}
        for h, term in enumerate(self.right):
            if isinstance(term, LowRank):
                named |= {f"right.{h}.{name}": a for name, a in term.named_arrays().items()}
            else:
                named[f"right.{h}"] = term
        return named

    @classmethod
    def from_named_arrays(cls, arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> KroneckerTerms:
        """Return the sum of these terms."""
        names = [f"right.{h}" for h in range(len(arrays["left"]))]
        right = [
            arrays[name] if name in arrays else LowRank(arrays[f"{name}.left"], arrays[f"{name}.right"])
            for name in names
        ]
        return cls(arrays["left"], right)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (p q, p' q') as a matrix on flattened arrays."""
        p, q, p_in, q_in = self._legs
        return p * q, p_in * q_in

    @property
    def ranks(self) -> tuple[int, ...]:
        """The number of terms, (H,)."""
        return (len(self.left),)

    def apply(self, x: Array) -> Array:
        r"""Return :math:`\sum_h A_h x B_h^T`, (p, q), for x (p', q'); no array of :math:`(p q)^2` entries is formed."""
        x = to_numpy("KroneckerTerms.apply", "x", x)
        expected = self._legs[2:]
        if x.shape != expected:
            raise ArgumentError(
                f"KroneckerTerms.apply: x must have shape (positions, features) = {expected}, got {x.shape}; "
                "positions come first."
            )
        return self._apply(x[None])[0]  # type: ignore[no-any-return]

    def full(self) -> Array:
        """Contract to the dense matrix (p q, p' q')."""
        refuse_too_large(self)
        dense = np.stack([np.asarray(term) for term in self.right])
        out: Array = np.einsum("hij,hkl->ikjl", self.left, dense)  # [h] p q p' q'
        return out.reshape(self.shape)

    def norm(self) -> float:
        """Frobenius norm without cancellation.

        With the left matrices as columns, :math:`L = Q T`, and the right ones, :math:`R = P S`, the operator is
        :math:`L R^T`, and its norm that of :math:`T S^T`, with a row and a column per term.
        """
        left, right, exponent = rescale_terms(self.left, right_factors(self))
        t, s = r_factor(left.reshape(len(left), -1).T), gram_factor(right)  # i h, j h
        return Scaled(t @ s.T, exponent).norm()  # i [h] j

    @property
    def T(self) -> KroneckerTerms:
        """The transpose, term by term."""
        return KroneckerTerms(self.left.transpose(0, 2, 1), [term.T for term in self.right])

    def _part(self, *, imaginary: bool) -> KroneckerTerms:
        """Return the real or the imaginary part: two terms, with Re(right[h]) and Im(right[h]), for each."""
        left = [self.left.imag, self.left.real] if imaginary else [self.left.real, -self.left.imag]
        right = [*(term.real for term in self.right), *(term.imag for term in self.right)]
        return KroneckerTerms(np.concatenate(left), right)

    def __matmul__(self, x: Any) -> Any:
        """Multiply with KroneckerTerms, a term for every pair of terms, or with a dense array."""
        if not isinstance(x, KroneckerTerms):
            return super().__matmul__(x)
        columns, rows = self._legs[2:], x._legs[:2]
        if columns != rows:
            raise ArgumentError(
                f"KroneckerTerms @ KroneckerTerms: the inner legs (positions, features) must have one size, got "
                f"{columns} and {rows}; transpose one of them."
            )
        left = self.left[:, None] @ x.left  # h g p [p'] p"
        right = [_product(a, b) for a in self.right for b in x.right]
        return KroneckerTerms(left.reshape(-1, *left.shape[2:]), right)

    @property
    def _legs(self) -> tuple[int, ...]:
        (_, p, p_in), (q, q_in) = self.left.shape, self.right[0].shape
        return p, q, p_in, q_in

    def _multiplied(self, number: Any) -> KroneckerTerms:
        return KroneckerTerms(number * self.left, self.right)

    def _added(self, other: KroneckerTerms) -> KroneckerTerms:
        return KroneckerTerms(np.concatenate([self.left, other.left]), (*self.right, *other.right))

    def _matmat(self, x: Array) -> Array:
        columns = np.ascontiguousarray(x.T).reshape(-1, *self._legs[2:])  # k p' q'
        return self._apply(columns).reshape(len(columns), -1).T

    def _apply(self, x: Array) -> Array:
        out = np.zeros((len(x), *self._legs[:2]), np.result_type(self.dtype, x))
        for a, b in zip(self.left, self.right, strict=True):
            pair = (x @ b.right.T, b.left.T) if isinstance(b, LowRank) else (x, b.T)  # k p' [q'] r
            out += _two_sided(a, *pair)
        return out


def right_factors(t: KroneckerTerms) -> list[Factors]:
    """Return the right matrices of `t`, each as one array (q, q') or as two factors (q, r) and (r, q')."""
    return [term.arrays() if isinstance(term, LowRank) else (term,) for term in t.right]


def _two_sided(a: Array, x: Array, b: Array) -> Array:
    """Return a x[k] b for a (p, p'), x (k, p', s) and b (s, q), in the cheaper order."""
    (p, p_in), (s, q) = a.shape, b.shape
    if p_in * q * (s + p) <= p * s * (p_in + q):
        return np.asarray(a @ (x @ b))  # k p [p'] [s] q
    return np.asarray((a @ x) @ b)  # k p [p'] [s] q


def _product(a: Array | LowRank, b: Array | LowRank) -> Array | LowRank:
    """Return a @ b, as factors where one of the two is."""
    match a, b:
        case LowRank(), np.ndarray():
            return LowRank(a.left, a.right @ b)
        case np.ndarray(), LowRank():
            return LowRank(a @ b.left, b.right)
    product: Array | LowRank = a @ b
    return product
