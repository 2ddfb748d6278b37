//! The inference rules, by family of operators.

use super::context::{Ctx, Facts, Ints};
use super::{Fact, dims};

mod control;
mod create;
mod elementwise;
mod index;
pub(crate) mod layout;
mod matrix;
mod nn;
mod quantize;
mod recurrent;
pub(crate) mod reduce;

/// A rule: infers facts about all outputs from the facts about the inputs.
pub(super) type Rule = fn(&Ctx) -> Facts;

/// The rule of an operator in the default domain.
pub(super) fn find(op_type: &str) -> Option<Rule> {
    Some(match op_type {
        "Abs"
        | "Acos"
        | "Acosh"
        | "Asin"
        | "Asinh"
        | "Atan"
        | "Atanh"
        | "BitwiseNot"
        | "Ceil"
        | "Celu"
        | "Cos"
        | "Cosh"
        | "Elu"
        | "Erf"
        | "Exp"
        | "Floor"
        | "Gelu"
        | "HardSigmoid"
        | "HardSwish"
        | "Identity"
        | "LRN"
        | "LeakyRelu"
        | "Log"
        | "LpNormalization"
        | "MeanVarianceNormalization"
        | "Mish"
        | "Neg"
        | "Not"
        | "Reciprocal"
        | "Relu"
        | "Round"
        | "Selu"
        | "Shrink"
        | "Sigmoid"
        | "Sign"
        | "Sin"
        | "Sinh"
        | "Softplus"
        | "Softsign"
        | "Sqrt"
        | "Swish"
        | "Tan"
        | "Tanh"
        | "ThresholdedRelu"
        | "Clip"
        | "Trilu"
        | "CumSum"
        | "CumProd"
        | "ReverseSequence"
        | "ScatterElements"
        | "Scatter"
        | "ScatterND"
        | "TensorScatter"
        | "RotaryEmbedding" => elementwise::like_first,
        "Softmax" | "LogSoftmax" | "Hardmax" => elementwise::along_axis,
        "IsNaN" | "IsInf" => elementwise::predicate,
        "Add" | "Sub" | "Mul" | "Div" | "BitwiseAnd" | "BitwiseOr" | "BitwiseXor" | "Mod" | "BitShift" => {
            elementwise::binary
        }
        "SwiGLU" => elementwise::binary_equal,
        "Pow" => elementwise::power,
        "PRelu" => elementwise::prelu,
        "Equal" | "Greater" | "GreaterOrEqual" | "Less" | "LessOrEqual" | "And" | "Or" | "Xor" => {
            elementwise::comparison
        }
        "Max" | "Min" | "Sum" | "Mean" => elementwise::variadic,
        "Where" => elementwise::where_,
        "Cast" => elementwise::cast,
        "CastLike" => elementwise::cast_like,
        "BitCast" => elementwise::bit_cast,
        "Dropout" => elementwise::dropout,

        "Shape" => layout::shape,
        "Size" => layout::size,
        "Reshape" => layout::reshape,
        "Flatten" => layout::flatten,
        "Squeeze" => layout::squeeze,
        "Unsqueeze" => layout::unsqueeze,
        "Expand" => layout::expand,
        "Tile" => layout::tile,
        "Transpose" => layout::transpose,
        "Concat" => layout::concat,
        "Split" => layout::split,
        "Slice" => layout::slice,
        "Pad" => layout::pad,
        "CenterCropPad" => layout::center_crop_pad,
        "DepthToSpace" => layout::depth_to_space,
        "SpaceToDepth" => layout::space_to_depth,

        "Constant" => create::constant,
        "ConstantOfShape" => create::constant_of_shape,
        "Range" => create::range,
        "EyeLike" => create::eye_like,
        "OneHot" => create::one_hot,
        "RandomNormalLike" | "RandomUniformLike" | "Bernoulli" => create::random_like,
        "RandomNormal" | "RandomUniform" => create::random,

        "Gather" => index::gather,
        "GatherElements" => index::gather_elements,
        "GatherND" => index::gather_nd,
        "Compress" => index::compress,
        "NonZero" => index::non_zero,
        "Unique" => index::unique,
        "TopK" => index::top_k,

        "ArgMax" | "ArgMin" => reduce::arg,
        "ReduceL1" | "ReduceL2" | "ReduceLogSum" | "ReduceLogSumExp" | "ReduceMax" | "ReduceMean"
        | "ReduceMin" | "ReduceProd" | "ReduceSum" | "ReduceSumSquare" => reduce::reduce,

        "MatMul" => matrix::matmul,
        "MatMulInteger" => matrix::matmul_integer,
        "QLinearMatMul" => matrix::qlinear_matmul,
        "Gemm" => matrix::gemm,
        "Einsum" => matrix::einsum,
        "Det" => matrix::det,
        "Attention" => matrix::attention,

        "Conv" => nn::conv,
        "ConvInteger" => nn::conv_integer,
        "QLinearConv" => nn::qlinear_conv,
        "ConvTranspose" => nn::conv_transpose,
        "AveragePool" | "LpPool" | "MaxPool" => nn::pool,
        "GlobalAveragePool" | "GlobalLpPool" | "GlobalMaxPool" => nn::global_pool,
        "BatchNormalization" => nn::batch_normalization,
        "InstanceNormalization" => nn::instance_normalization,
        "GroupNormalization" => nn::group_normalization,
        "LayerNormalization" => nn::layer_normalization,
        "RMSNormalization" => nn::rms_normalization,
        "Resize" | "Upsample" => nn::resize,
        "GridSample" => nn::grid_sample,
        "AffineGrid" => nn::affine_grid,
        "RoiAlign" => nn::roi_align,

        "QuantizeLinear" => quantize::quantize,
        "DequantizeLinear" => quantize::dequantize,
        "DynamicQuantizeLinear" => quantize::dynamic,

        "LSTM" | "GRU" | "RNN" => recurrent::recurrent,

        "If" => control::if_,
        _ => return None,
    })
}

/// The rule of an operator that ONNX Runtime adds to ai.onnx.
pub(super) fn find_microsoft(op_type: &str) -> Option<Rule> {
    Some(match op_type {
        "DynamicQuantizeLSTM" => recurrent::recurrent,
        "DynamicQuantizeMatMul" | "MatMulIntegerToFloat" => recurrent::product_to_float,
        _ => return None,
    })
}

/// A single output with this type and shape.
fn one(dtype: Option<sdrun_abi::DType>, shape: Option<Vec<crate::Dim>>) -> Facts {
    Ok(vec![Fact::new(dtype, shape)])
}
