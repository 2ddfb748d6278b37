//! Maps operators to kernels.

use super::call::{Call, Outputs};
use super::{
    activation, attention, binary, cast, conv, conv_transpose, create, einsum, gather, layout, matmul, norm,
    pool, quantize, recurrent, reduce, resize, rotary, sample, scatter, search, softmax, unary,
};

/// Computes all outputs of a node.
pub(super) type Kernel = fn(&Call) -> Outputs;

/// The kernel of an operator of the default domain.
pub(super) fn find(op_type: &str) -> Option<Kernel> {
    Some(match op_type {
        "Abs" | "Acos" | "Acosh" | "Asin" | "Asinh" | "Atan" | "Atanh" | "Ceil" | "Cos" | "Cosh" | "Erf"
        | "Exp" | "Floor" | "Log" | "Neg" | "Reciprocal" | "Round" | "Sign" | "Sin" | "Sinh" | "Sqrt"
        | "Tan" | "Tanh" => unary::math,
        "Celu" | "Elu" | "Gelu" | "HardSigmoid" | "HardSwish" | "LeakyRelu" | "Mish" | "Relu" | "Selu"
        | "Shrink" | "Sigmoid" | "Softplus" | "Softsign" | "Swish" | "ThresholdedRelu" => {
            activation::activate
        }
        "PRelu" => activation::prelu,
        "SwiGLU" => activation::swiglu,
        "Not" | "BitwiseNot" => unary::not,
        "IsNaN" => unary::is_nan,
        "IsInf" => unary::is_inf,
        "Identity" | "Dropout" => unary::pass,

        "Add" | "Sub" | "Mul" | "Div" | "Mod" => binary::arithmetic,
        "Pow" => binary::power,
        "BitwiseAnd" | "BitwiseOr" | "BitwiseXor" | "BitShift" => binary::bitwise,
        "Equal" | "Greater" | "GreaterOrEqual" | "Less" | "LessOrEqual" => binary::compare,
        "And" | "Or" | "Xor" => binary::logical,
        "Max" | "Min" | "Sum" | "Mean" => binary::variadic,
        "Where" => binary::where_,
        "Clip" => binary::clip,

        "Cast" | "CastLike" => cast::cast,
        "BitCast" => cast::bit_cast,

        "Shape" | "Size" | "Constant" => create::from_rule,
        "ConstantOfShape" => create::constant_of_shape,
        "Range" => create::range,
        "EyeLike" => create::eye_like,
        "OneHot" => create::one_hot,
        "Trilu" => create::trilu,

        "Reshape" | "Flatten" | "Squeeze" | "Unsqueeze" => layout::reshape,
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

        "Gather" => gather::gather,
        "GatherElements" => gather::gather_elements,
        "GatherND" => gather::gather_nd,
        "Compress" => gather::compress,
        "ReverseSequence" => gather::reverse_sequence,
        "ScatterElements" | "Scatter" => scatter::scatter_elements,
        "ScatterND" => scatter::scatter_nd,
        "TensorScatter" => scatter::tensor_scatter,

        "NonZero" => search::non_zero,
        "Unique" => search::unique,
        "TopK" => search::top_k,
        "ArgMax" | "ArgMin" => search::arg,

        "ReduceL1" | "ReduceL2" | "ReduceLogSum" | "ReduceLogSumExp" | "ReduceMax" | "ReduceMean"
        | "ReduceMin" | "ReduceProd" | "ReduceSum" | "ReduceSumSquare" => reduce::reduce,
        "CumSum" | "CumProd" => reduce::cumulative,
        "Softmax" | "LogSoftmax" | "Hardmax" => softmax::softmax,

        "MatMul" => matmul::matmul,
        "MatMulInteger" => matmul::matmul_integer,
        "QLinearMatMul" => quantize::qlinear_matmul,
        "Gemm" => matmul::gemm_node,
        "Det" => matmul::det,
        "Einsum" => einsum::einsum,
        "Attention" => attention::attention,
        "RotaryEmbedding" => rotary::rotary_embedding,

        "Conv" => conv::conv,
        "ConvInteger" => conv::conv_integer,
        "QLinearConv" => quantize::qlinear_conv,
        "ConvTranspose" => conv_transpose::conv_transpose,
        "MaxPool" => pool::max_pool,
        "AveragePool" | "LpPool" => pool::pool,
        "GlobalAveragePool" | "GlobalLpPool" | "GlobalMaxPool" => pool::global_pool,
        "BatchNormalization" => norm::batch,
        "InstanceNormalization" | "GroupNormalization" => norm::group,
        "LayerNormalization" => norm::layer,
        "RMSNormalization" => norm::rms,
        "LpNormalization" => norm::lp,
        "MeanVarianceNormalization" => norm::mean_variance,
        "LRN" => norm::local_response,
        "Resize" | "Upsample" => resize::resize,
        "GridSample" => sample::grid_sample,
        "AffineGrid" => sample::affine_grid,
        "RoiAlign" => sample::roi_align,

        "QuantizeLinear" => quantize::quantize,
        "DequantizeLinear" => quantize::dequantize,
        "DynamicQuantizeLinear" => quantize::dynamic,

        "LSTM" | "GRU" | "RNN" => recurrent::recurrent,
        _ => return None,
    })
}

/// The kernel of an operator that ONNX Runtime adds to ai.onnx.
pub(super) fn find_microsoft(op_type: &str) -> Option<Kernel> {
    Some(match op_type {
        "DynamicQuantizeLSTM" => recurrent::recurrent,
        "DynamicQuantizeMatMul" => quantize::dynamic_matmul,
        "MatMulIntegerToFloat" => quantize::matmul_to_float,
        _ => return None,
    })
}
