"""Names and ranges that options, kernels and commands have in common. Imports nothing heavy."""

from typing import Literal

Score = Literal["dot", "l2", "cosine"]  # s_j = u.v_j, -||u - v_j||^2, or u.v_j with rows of length 1
Weight = Literal["uniform", "precision", "recall", "ndcg", "ap"]  # rank weights w_k of the relaxed metric
ObjectiveName = Literal[
    "hinge+drm", "hinge", "drm", "mse", "mse+drm",
    "softmax", "softmax+drm", "softmax@k", "psl", "psl+drm", "bpr", "bpr+drm",
]  # fmt: skip
Negatives = Literal["sampled", "all"]
InteractionWeights = Literal["off", "raw", "log", "bm25"]  # how a data set's weights enter the loss
UserSampling = Literal["proportional", "uniform"]
NegativeSampling = Literal["uniform", "popularity"]
Init = Literal["spectral", "normal"]
Precision = Literal["float32", "bfloat16"]  # of the factor tables in training
Schedule = Literal["linear", "constant"]
CovForm = Literal["decorrelate", "printed"]
BackendName = Literal["reference", "triton", "cpu"]
BackendChoice = Literal["auto", "cpu", "triton", "reference"]
Output = Literal["sampled", "full"]  # items that the loss of an autoencoder is computed for
SimilarityName = Literal["cosine", "jaccard", "dice"]  # of items, by the users that they share
SplitName = Literal["random", "per-user", "leave-last", "time", "users"]
SplitPart = Literal["train", "valid", "test"]
FitOn = Literal["train", "train+valid", "all"]
Unknown = Literal["error", "skip", "popular"]  # handling of ids that the model does not know
DecimalMark = Literal["point", "comma"]  # of numbers in text files
Leading = Literal["user", "count", "none"]  # first field of a line in files with one list of items per line
ExportFormat = Literal["npz", "parquet", "faiss", "hnswlib"]
RelaxedMetric = Literal["precision", "recall", "ndcg", "ap"]
Reduction = Literal["mean", "sum", "none"]
LogTo = Literal["tensorboard", "mlflow", "wandb"]  # services that `train --log` writes to
Target = Literal["table1", "table3", "table4", "table5", "figure2", "figure3"]  # of the paper, that `reproduce` makes
SoftTopK = Literal["neuralsort", "lapsum"]  # operators of `soft_topk`

LOSSES = ("hinge", "drm", "mse", "softmax", "psl", "bpr")  # parts of an objective
SPLIT_PARTS = ("train", "valid", "test")
MAX_RANKS = 64  # processes that train together
RANK_TIMEOUT = 300  # seconds that a rank waits for another
METRICS = ("precision", "recall", "ndcg", "map", "map_k", "hit", "mrr")
CUT_OFFS = (10, 50)  # K of the metrics, by default
HEADLINE_METRICS = ("valid/ndcg@10", "valid/map@10", "valid/recall@50")  # shown in curves and after training
COMPARED_METRICS = ("ndcg", "map", "recall")  # of `compare`, by default
MIN_TRAIN = 5  # users with fewer training items are not evaluated, as in the paper

TAU_RANGE = (1e-32, 1e32)  # outside it, rank / tau or its inverse overflows float32
MAX_FLOAT32 = 3.4e38
WEIGHT_RANGE = (1e-20, 1e20)  # of an interaction; sums and quotients of weights then stay within float32
MAX_INT32 = 2**31 - 1
MAX_THREADS = 1024  # torch starts as many as it is told, whatever the number of cores
MAX_SEED = 2**63 - 1
