"""Do samples look like the class they were asked for? A linear classifier on the features of real images answers."""

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

REGULARISATION = 0.01  # scikit-learn's C: strong, for 1280 features of a few thousand images


class ClassAgreement:
    """Logistic regression on standardised features (N, D) of real images with labels (N,)."""

    def __init__(self, features: np.ndarray, labels: np.ndarray):
        self._classifier = make_pipeline(StandardScaler(), LogisticRegression(C=REGULARISATION, max_iter=200))
        self._classifier.fit(features, labels)

    def __call__(self, features: np.ndarray, labels: np.ndarray) -> float:
        """The fraction of images whose predicted class is the one given."""
        return float((self._classifier.predict(features) == labels).mean())
