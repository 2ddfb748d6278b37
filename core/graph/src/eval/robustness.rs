//! Random nodes with random inputs: kernels must not panic and must agree with inference.

use super::{EvalError, evaluate, kernels};
use crate::infer::{Fact, node_outputs};
use crate::{Attribute, Node, OPSETS, Tensor, ValueId};
use proptest::prelude::*;
use proptest::sample::select;
use sdrun_abi::DType;

/// Every operator that has a kernel.
const OPERATORS: &str = "Abs Acos Acosh Add AffineGrid And ArgMax ArgMin Asin Asinh Atan Atanh Attention \
    AveragePool BatchNormalization BitCast BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike Ceil \
    Celu CenterCropPad Clip Compress Concat Constant ConstantOfShape Conv ConvInteger ConvTranspose Cos Cosh \
    CumProd CumSum DepthToSpace DequantizeLinear Det Div Dropout DynamicQuantizeLinear Einsum Elu Equal Erf Exp \
    Expand EyeLike Flatten Floor Gather GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalLpPool \
    GlobalMaxPool Greater GreaterOrEqual GridSample GroupNormalization HardSigmoid HardSwish Hardmax Identity \
    InstanceNormalization IsInf IsNaN LRN LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax \
    LpNormalization LpPool MatMul MatMulInteger Max MaxPool Mean MeanVarianceNormalization Min Mish Mod Mul Neg \
    NonZero Not OneHot Or PRelu Pad Pow QLinearConv QLinearMatMul QuantizeLinear RMSNormalization Range Reciprocal \
    ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum \
    ReduceSumSquare Relu Reshape Resize ReverseSequence RoiAlign RotaryEmbedding Round Scatter ScatterElements \
    ScatterND Selu Shape Shrink Sigmoid Sign Sin Sinh Size Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt \
    Squeeze Sub Sum SwiGLU Swish Tan Tanh TensorScatter ThresholdedRelu Tile TopK Transpose Trilu Unique Unsqueeze \
    Upsample Where Xor";

const INTS: &str = "allowzero antialias align_corners axis batch_axis batch_dims block_size blocksize ceil_mode \
    count_include_pad detect_negative exclude_outside exclusive fmod group interleaved is_causal k keepdims \
    kv_num_heads largest noop_with_empty_axes num_groups num_heads num_outputs output_dtype output_height p \
    q_num_heads reverse rotary_embedding_dim sampling_ratio select_last_index size sorted start storage_order \
    time_axis to transA transB upper";
const LISTS: &str =
    "axes dilations ends kernel_shape output_padding output_shape pads perm split starts strides";
const STRINGS: [(&str, &[&str]); 9] = [
    ("auto_pad", &["SAME_UPPER", "SAME_LOWER", "VALID"]),
    (
        "coordinate_transformation_mode",
        &["align_corners", "asymmetric", "tf_crop_and_resize", "half_pixel_symmetric"],
    ),
    ("direction", &["LEFT", "RIGHT"]),
    ("equation", &["ij,jk->ik", "...i,...i", "ii->i", "a,b"]),
    ("keep_aspect_ratio_policy", &["not_larger", "not_smaller"]),
    ("mode", &["linear", "cubic", "nearest", "edge", "wrap", "reflect", "max", "circular"]),
    ("nearest_mode", &["ceil", "floor"]),
    ("padding_mode", &["border", "reflection"]),
    ("reduction", &["add", "mul", "min"]),
];

fn attribute() -> impl Strategy<Value = (String, Attribute)> {
    let words = |s: &'static str| select(s.split_whitespace().collect::<Vec<_>>());
    let name = |n: &str| n.to_owned();
    prop_oneof![
        4 => (words(INTS), -2i64..6).prop_map(move |(n, v)| (name(n), Attribute::Int(v))),
        4 => (words(LISTS), prop::collection::vec(-1i64..4, 0..5)).prop_map(move |(n, v)| (name(n), Attribute::Ints(v))),
        2 => select(STRINGS.to_vec())
            .prop_flat_map(|(n, v)| (Just(n), select(v.to_vec())))
            .prop_map(move |(n, v)| (name(n), Attribute::String(v.as_bytes().to_vec()))),
        1 => (words("epsilon alpha beta scale softcap"), -2f32..2.0)
            .prop_map(move |(n, v)| (name(n), Attribute::Float(v))),
        1 => prop::collection::vec(0.1f32..3.0, 0..4).prop_map(move |v| (name("scales"), Attribute::Floats(v))),
    ]
}

fn tensor(dtype: DType, shape: Vec<usize>, numbers: &[i64]) -> Tensor {
    let len: usize = shape.iter().product();
    let values: Vec<i128> = (0..len).map(|i| i128::from(numbers[i % numbers.len()])).collect();
    super::number::store(dtype, shape, &values).unwrap()
}

fn shape() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop_oneof![1 => Just(0usize), 20 => 1usize..3, 5 => 3usize..5], 0..5)
}

/// Inputs that mostly share an element type or shape, like valid ones; some are small lists of integers.
fn inputs() -> impl Strategy<Value = Vec<Option<Tensor>>> {
    let dtype = || {
        select(vec![
            DType::F32,
            DType::F32,
            DType::I64,
            DType::F16,
            DType::F64,
            DType::Bool,
            DType::U8,
            DType::F8E4M3,
        ])
    };
    (dtype(), shape()).prop_flat_map(move |(common_dtype, common_shape)| {
        let numbers = || prop::collection::vec(-2i64..5, 1..6);
        let like = (Just(common_dtype), Just(common_shape.clone()), numbers());
        let reshaped = (Just(common_dtype), shape(), numbers());
        let ints = (Just(DType::I64), (0usize..4).prop_map(|n| vec![n]), numbers());
        let scalar = (Just(common_dtype), Just(vec![]), numbers());
        let any = (dtype(), shape(), numbers());
        let one = prop_oneof![
            3 => like.prop_map(Some), 3 => reshaped.prop_map(Some), 3 => ints.prop_map(Some),
            1 => scalar.prop_map(Some), 1 => any.prop_map(Some), 1 => Just(None),
        ];
        prop::collection::vec(one.prop_map(|t| t.map(|(d, s, n)| tensor(d, s, &n))), 0..7)
    })
}

/// Attributes that some operators need to get past inference at all.
fn required() -> impl Strategy<Value = Vec<(String, Attribute)>> {
    let ints =
        |n: &'static str, v: std::ops::Range<i64>| v.prop_map(move |v| (n.to_owned(), Attribute::Int(v)));
    let text = |n: &'static str| {
        let values = STRINGS.iter().find(|(name, _)| *name == n).map_or(&[][..], |(_, v)| *v);
        select(values.to_vec()).prop_map(move |v| (n.to_owned(), Attribute::String(v.as_bytes().to_vec())))
    };
    let kernel =
        prop::collection::vec(1i64..3, 1..3).prop_map(|v| ("kernel_shape".to_owned(), Attribute::Ints(v)));
    let heads = (ints("q_num_heads", 1..3), ints("kv_num_heads", 1..3), ints("num_heads", 1..3));
    let sizes = (ints("num_groups", 1..3), ints("blocksize", 1..3), ints("size", 1..4), ints("to", 1..17));
    (kernel, sizes, heads, text("direction"), text("equation"))
        .prop_map(|(k, (a, b, c, d), (e, f, g), h, i)| vec![k, a, b, c, d, e, f, g, h, i])
}

fn node() -> impl Strategy<Value = Node> {
    let operators: Vec<&str> = OPERATORS.split_whitespace().collect();
    let attributes = (required(), prop::bool::weighted(0.9), prop::collection::vec(attribute(), 0..3));
    (select(operators), attributes, 1u32..4).prop_map(|(op, (required, keep, others), outputs)| Node {
        name: String::new(),
        domain: String::new(),
        op_type: op.into(),
        inputs: vec![],
        outputs: (0..outputs).map(|i| Some(ValueId(i))).collect(),
        attributes: required
            .into_iter()
            .filter(|(n, _)| keep && (n != "kernel_shape" || op.ends_with("Pool")))
            .chain(others)
            .collect(),
        metadata: Default::default(),
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4096, ..Default::default() })]

    #[test]
    fn nodes_evaluate_as_inferred_or_return_an_error(node in node(), opset in OPSETS, inputs in inputs()) {
        let operands: Vec<Option<&Tensor>> = inputs.iter().map(Option::as_ref).collect();
        let facts: Vec<Option<Fact>> = inputs.iter().map(|t| t.as_ref().map(Fact::typed)).collect();
        let inferred = node_outputs(&node, opset, &facts);
        match evaluate(&node, opset, &operands) {
            Ok(values) => {
                // Inference may know less than evaluation, but must not contradict it.
                for (fact, value) in inferred.unwrap().unwrap().iter().zip(&values) {
                    prop_assert!(fact.dtype.is_none_or(|t| t == value.dtype()), "{fact:?} for {value:?}");
                    if let Some(shape) = &fact.shape {
                        prop_assert_eq!(shape.len(), value.shape().len());
                        for (d, n) in shape.iter().zip(value.shape()) {
                            prop_assert!(d.known().is_none_or(|d| d == *n), "{:?} for {:?}", fact, value);
                        }
                    }
                }
            }
            Err(EvalError::Invalid(e) | EvalError::Unsupported { why: e, .. }) => prop_assert!(!e.is_empty()),
        }
    }
}

#[test]
fn every_operator_has_a_kernel_and_a_rule() {
    for op in OPERATORS.split_whitespace() {
        assert!(kernels::find(op).is_some(), "{op} has no kernel");
        assert!(crate::infer::has_rule(op), "{op} has no rule");
    }
}
