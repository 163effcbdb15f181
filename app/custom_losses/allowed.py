"""What a custom loss may call: the one list that the API checks uploads against and the worker builds its tables from.

Elementwise, reducing and shaping operations on tensors, and arithmetic on numbers (SEMANTICS §4). What is missing is
missing on purpose: random draws, tensors made from nothing but numbers, results whose shape depends on values, in-place
methods, anything that reads a tensor back into Python, and everything that is no mathematics.
"""

from __future__ import annotations

FORMAT = 1
MAX_GRAPH_BYTES = 2**18
MAX_NODES = 512
MAX_INPUTS = 16
MAX_NAME_CHARACTERS = 200
MAX_LOSSES_PER_SESSION = 1000
MAX_LITERAL_ITEMS = 64
"""Entries of one list, tuple or dict, and arguments of one node."""
MAX_LITERAL_DEPTH = 6
MAX_PARTS = 256
"""Parts of one result, like those that `unbind` has."""
MAX_INTEGER = 2**53
"""Largest magnitude of an integer, in the graph and as the value of a node."""
MAX_OUTPUT_BYTES = 64 * 2**20
"""Of all results that one datum's evaluation makes on its way, added up."""
MAX_ELEMENT_OPERATIONS = 10**9
"""Of one datum's evaluation."""
MAX_BATCH_OPERATIONS = 10**10
"""Of all datums of a request."""
MAX_BATCH_NODES = 2**20
"""Nodes times datums of a request."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_SHARED = _words("""
    abs absolute acos acosh add addcdiv addcmul all amax amin any argmax argmin argsort asin asinh atan atan2
    atanh bitwise_and bitwise_not bitwise_or bitwise_xor bmm broadcast_to ceil chunk clamp clamp_max clamp_min
    clip clone copysign cos cosh count_nonzero cummax cummin cumprod cumsum deg2rad detach diag diagonal diff
    div divide dot eq erf erfc erfinv exp exp2 expm1 flatten flip floor floor_divide fmax fmin fmod frac gather
    ge greater greater_equal gt heaviside hypot index_add index_fill index_select inner isclose isfinite isinf
    isnan kthvalue le lerp less less_equal lgamma log log10 log1p log2 log_softmax logaddexp logaddexp2
    logcumsumexp logical_and logical_not logical_or logical_xor logit logsumexp lt masked_fill matmul max
    maximum mean median min minimum mm mode moveaxis movedim msort mul multiply mv nan_to_num nanmean nanmedian
    nanquantile nansum narrow ne neg negative nextafter norm not_equal numel outer permute positive pow prod
    quantile rad2deg ravel reciprocal relu remainder repeat_interleave reshape roll round rsqrt scatter
    scatter_add select sgn sigmoid sign sin sinc sinh softmax sort split sqrt square squeeze std sub subtract
    sum swapaxes swapdims t take_along_dim tan tanh tile topk transpose tril triu true_divide trunc unbind
    unflatten unsqueeze var where xlogy
""")
"""Functions of torch that are methods of a tensor too."""

TORCH_FUNCTIONS = _SHARED + _words("""
    bucketize cat celu concat concatenate cosine_similarity cumulative_trapezoid dstack full_like hstack
    ones_like searchsorted selu stack std_mean trapezoid var_mean vstack zeros_like
""")
"""`torch.<name>`."""

TORCH_ALIASES = {"torch.functional.norm": "norm", "torch.functional.split": "split"}
"""How torch.fx names functions of `torch` that are written in Python."""

FUNCTIONAL_FUNCTIONS = _words("""
    binary_cross_entropy binary_cross_entropy_with_logits celu cosine_similarity elu gelu hardsigmoid hardswish
    hardtanh huber_loss kl_div l1_loss leaky_relu log_softmax logsigmoid mish mse_loss normalize pad
    poisson_nll_loss relu relu6 selu sigmoid silu smooth_l1_loss soft_margin_loss softmax softmin softplus
    softsign tanh tanhshrink threshold
""")
"""`torch.nn.functional.<name>`."""

SPECIAL_FUNCTIONS = _words("""
    entr erf erfc erfinv exp2 expit expm1 log1p log_ndtr log_softmax logit logsumexp ndtr softmax xlog1py xlogy
""")
"""`torch.special.<name>`."""

FUNCTIONAL_ALIASES = {
    "torch._C._nn.gelu": "gelu",
    "torch._C._nn.softplus": "softplus",
    "torch._C._nn.log_sigmoid": "logsigmoid",
    "torch.nn.functional._threshold": "threshold",
}
"""How torch.fx names functions of `torch.nn.functional` that are written in C++."""

METHODS = _SHARED + _words("""
    bfloat16 bool contiguous dim double element_size expand expand_as float half int long ndimension nelement
    repeat reshape_as size sum_to_size to type_as view view_as
""")
"""Methods of `torch.Tensor`."""

TENSOR_ATTRIBUTES = ("shape", "dtype", "ndim", "device", "T", "mT")
RESULT_ATTRIBUTES = ("values", "indices")
"""Of what `max`, `sort`, `topk` and their like give along a dimension."""
ATTRIBUTES = TENSOR_ATTRIBUTES + RESULT_ATTRIBUTES

MATH_FUNCTIONS = _words("""
    acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh degrees erf erfc exp expm1 fabs floor fmod
    hypot isclose isfinite isinf isnan lgamma log log10 log1p log2 pow radians sin sinh sqrt tan tanh trunc
""")
"""`math.<name>`, on numbers."""

OPERATOR_FUNCTIONS = _words("""
    abs add and_ eq floordiv ge getitem gt iadd iand ifloordiv imul invert ior ipow isub itruediv ixor le lshift
    lt matmul mod mul ne neg or_ pos pow rshift sub truediv xor
""")
"""`operator.<name>`, on numbers and tensors; `getitem` also on shapes and results with several parts."""

GETATTR_NAMES = frozenset({"getattr", "builtins.getattr"})

FUNCTIONS = frozenset(
    (
        *(f"torch.{name}" for name in TORCH_FUNCTIONS),
        *(f"torch.nn.functional.{name}" for name in FUNCTIONAL_FUNCTIONS),
        *(f"torch.special.{name}" for name in SPECIAL_FUNCTIONS),
        *(f"torch._C._special.special_{name}" for name in SPECIAL_FUNCTIONS),
        *(f"torch.Tensor.{name}" for name in METHODS),
        *TORCH_ALIASES,
        *FUNCTIONAL_ALIASES,
        *(f"math.{name}" for name in MATH_FUNCTIONS),
        *(f"operator.{name}" for name in OPERATOR_FUNCTIONS),
        *GETATTR_NAMES,
    )
)
"""Every `target` of a `call_function` node that is allowed."""

REFUSED_KEYWORDS = frozenset(
    _words("out inplace generator pin_memory requires_grad names output_size sorter sparse_grad")
)
"""Keyword arguments that write elsewhere, draw, allocate in special places, or promise what only values can tell."""

STRINGS = frozenset(
    _words("""
    none mean sum batchmean floor trunc prod amax amin fro constant reflect replicate circular linear lower
    higher midpoint nearest tanh left right
""")
)
"""Text arguments: modes of the functions above. A device is never named by text."""

CONSTANTS = {
    "dtype": frozenset(_words("bool bfloat16 float float16 float32 float64 double half int int32 int64 long")),
    "device": None,
    "layout": frozenset({"strided"}),
    "memory_format": frozenset({"contiguous_format", "preserve_format"}),
}
"""Torch's own constants; None: any name, since a loss runs where the service decides."""
