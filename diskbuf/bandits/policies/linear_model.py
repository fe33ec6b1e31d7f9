"""Ridge regressions side by side, one for each arm, that take rows as they come."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_PIECE = 8192  # numbers, 64 KB; OpenBLAS takes no threads for a matrix of fewer than 9,216


class LinearModel:
    """What each arm's reward is expected to be, linear in the context, and how sure that is.

    For each arm, with its rows X and rewards r, the estimate is A^-1 X^T r, where A = X^T X + tikhonov_weight * I, and
    the width of a context x is sqrt(x^T A^-1 x). Li, Chu, Langford and Schapire, "A Contextual-Bandit Approach to
    Personalized News Article Recommendation" (2010).

    A itself is never formed. What is kept is its triangular factor R, with A = R^T R, beside z = R^-T X^T r, and new
    rows are set below the two and rotated into them by a QR decomposition: the square-root information filter of
    Bierman, "Factorization Methods for Discrete Sequential Estimation" (1977), chapter V. So the numbers stay good for
    contexts whose features are nearly dependent, where forming A would lose half of the digits.

    Args:
        num_actions: K.
        num_features: d.
        tikhonov_weight: Above 0.
        gamma: What older rows count for after each update, from 0 to 1.
    """

    def __init__(self, num_actions: int, num_features: int, *, tikhonov_weight: float = 1.0, gamma: float = 1.0):
        self._gamma = gamma
        self._tikhonov_weight = tikhonov_weight
        self._information = np.zeros((num_actions, num_features, num_features + 1))
        self._information[:, :, :-1] = np.sqrt(tikhonov_weight) * np.eye(num_features)
        self._solved = np.zeros_like(self._information)
        self._solve(np.arange(num_actions))

    @property
    def information(self) -> Floats:
        """[K, d, d + 1], each arm's R with z as one more column: all that it has learnt. Set it to bring that back."""
        return self._information

    @information.setter
    def information(self, information: Floats) -> None:
        self._information = information
        self._solve(np.arange(len(information)))

    @property
    def theta(self) -> Floats:
        """[K, d], the weights of the features."""
        theta: Floats = self._solved[:, :, 0]
        return theta.copy()

    @property
    def covariance(self) -> Floats:
        """[K, d, d], the sum of x x^T over each arm's rows, without the Tikhonov weight."""
        factor = self._information[:, :, :-1]
        weight: Floats = self._tikhonov_weight * np.eye(factor.shape[1])
        return np.asarray(factor.transpose(0, 2, 1) @ factor - weight)

    @property
    def data_vector(self) -> Floats:
        """[K, d], the sum of reward * x over each arm's rows."""
        return np.asarray(np.einsum("kij,ki->kj", self._information[:, :, :-1], self._information[:, :, -1]))

    @property
    def solved(self) -> Floats:
        """[d, K * (1 + d)], each arm's theta and R^-1 side by side: contexts times this give all estimates."""
        return self._flat

    def estimates(self, features: Floats) -> tuple[Floats, Floats]:
        """Returns the expected rewards [B, K] and their widths [B, K].

        Args:
            features: [B, d].
        """
        arms, size = self._information.shape[:2]
        product = (features @ self._flat).reshape(len(features), arms, size + 1)
        spread = product[:, :, 1:]
        return product[:, :, 0], np.sqrt(np.einsum("bkd,bkd->bk", spread, spread))

    def expected(self, features: Floats) -> Floats:
        """Returns the expected rewards [B, K] alone.

        Args:
            features: [B, d].
        """
        return features @ self._solved[:, :, 0].T

    def update(
        self,
        features: Floats,
        index: npt.NDArray[np.int64],
        reward: npt.NDArray[np.float32],
        weights: npt.NDArray[np.float32] | None,
    ) -> None:
        """Takes rows, after older ones were forgotten by gamma.

        Args:
            features: [N, d].
            index: [N], arms.
            reward: [N].
            weights: [N] at least 0, what each row counts; None for 1.
        """
        arms, size = self._information.shape[:2]
        rows = np.concatenate([features, reward[:, None]], axis=1, dtype=np.float64)
        if weights is not None:
            rows *= np.sqrt(weights, dtype=np.float64)[:, None]
        # NumPy sorts small integers by counting.
        order = np.argsort(index.astype(np.min_scalar_type(arms)), kind="stable")
        rows = rows.take(order, axis=0)
        ends = np.bincount(index, minlength=arms).cumsum()
        touched = [arm for arm in range(arms) if self._gamma < 1 or ends[arm] > (ends[arm - 1] if arm else 0)]
        prior = self._prior()
        for arm in touched:
            new = rows[ends[arm - 1] if arm else 0 : ends[arm]]
            stacked = np.concatenate([np.sqrt(self._gamma) * self._information[arm], prior, new])
            self._information[arm] = triangular_factor(stacked)[:size]
        self._solve(np.array(touched, np.intp))

    def _prior(self) -> Floats:
        """[d or 0, d + 1], what gives back to the Tikhonov weight what forgetting took from it."""
        size = self._information.shape[1]
        lost = (1 - self._gamma) * self._tikhonov_weight
        return np.asarray(np.sqrt(lost) * np.eye(size if lost else 0, size + 1))

    def _solve(self, arms: npt.NDArray[np.intp]) -> None:
        """Works out theta = R^-1 z and R^-1 for some arms."""
        size = self._information.shape[1]
        factor, target = self._information[arms, :, :-1], self._information[arms, :, -1:]
        identity = np.broadcast_to(np.eye(size), factor.shape)
        # LU leaves a triangular matrix as it is, so this is back substitution.
        self._solved[arms] = np.linalg.solve(factor, np.concatenate([target, identity], axis=2))
        self._flat = np.ascontiguousarray(self._solved.transpose(1, 0, 2)).reshape(size, -1)


def triangular_factor(rows: Floats) -> Floats:
    """Returns R [min(N, c), c] of the QR decomposition of rows [N, c], up to the signs of its rows.

    Many rows are taken in pieces that stay in the cache, and the pieces' factors are decomposed together: the TSQR of
    Demmel, Grigori, Hoemmen and Langou, "Communication-optimal Parallel and Sequential QR and LU Factorizations"
    (2012). Without it LAPACK goes through all rows for each column, and BLAS shares each of these short ways out to
    threads, which takes several times as long, more so where other processes want the processor.
    """
    columns = rows.shape[1]
    height = max(2 * columns, _PIECE // max(1, columns))
    while len(rows) > height:
        whole = len(rows) // height * height
        factors = np.asarray(np.linalg.qr(rows[:whole].reshape(-1, height, columns), mode="r"))
        rows = np.concatenate([factors.reshape(-1, columns), rows[whole:]])
    return np.asarray(np.linalg.qr(rows, mode="r"))
