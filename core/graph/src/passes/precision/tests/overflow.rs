//! Activations beyond f16's range, at the places where they occur in real checkpoints.

use super::*;
use crate::passes::testing::noise;

const X: &str = "x";

fn scaled(shape: &[usize], seed: u32, factor: f32) -> Tensor {
    let values: Vec<f32> = noise(shape, seed).to_f32s().unwrap().iter().map(|v| v * factor).collect();
    Tensor::from_elements(shape.to_vec(), &values).unwrap()
}

/// A model whose input, output and weights share one type.
struct Block(Model, DType);

impl Block {
    fn new(dtype: DType, shape: &str) -> Self {
        Block(model(17).input(X, dtype, shape), dtype)
    }
    fn weight(self, name: &str, tensor: Tensor) -> Self {
        Block(self.0.initializer(name, &tensor.to_float_type(self.1).unwrap()), self.1)
    }
    fn ints(self, name: &str, values: &[i64]) -> Self {
        Block(self.0.initializer(name, &Tensor::from_i64s(values)), self.1)
    }
    fn node(self, op: &str, inputs: &[&str], output: &str) -> Self {
        self.node_with(op, inputs, output, [])
    }
    fn node_with<const N: usize>(
        self,
        op: &str,
        inputs: &[&str],
        output: &str,
        with: [(&str, Attribute); N],
    ) -> Self {
        Block(self.0.node_with(op, inputs, &[output], with), self.1)
    }
    /// A decomposed root-mean-square norm.
    fn rms_norm(self, x: &str, y: &str) -> Self {
        let at = |part: &str| format!("{y}.{part}");
        self.weight(&at("two"), Tensor::scalar(2f32))
            .weight(&at("eps"), Tensor::scalar(1e-3f32))
            .node("Pow", &[x, &at("two")], &at("square"))
            .node_with("ReduceMean", &[&at("square")], &at("mean"), [("axes", Attribute::Ints(vec![-1]))])
            .node("Add", &[&at("mean"), &at("eps")], &at("sum"))
            .node("Sqrt", &[&at("sum")], &at("root"))
            .node("Div", &[x, &at("root")], &at("normed"))
            .weight(&at("weight"), scaled(&[16], 77, 1.0))
            .node("Mul", &[&at("weight"), &at("normed")], y)
    }
    fn silu(self, x: &str, y: &str) -> Self {
        let sigmoid = format!("{y}.sigmoid");
        self.node("Sigmoid", &[x], &sigmoid).node("Mul", &[x, &sigmoid], y)
    }
    /// The graph; `y` is its output.
    fn graph(mut self, shape: &str) -> Graph {
        self.0.graph_mut().output.push(crate::testing::value("y", self.1, shape));
        inferred(&self.0)
    }
}

/// Scores of 90,000: as in Stable Diffusion 2.1, a few channels of Q and K are large.
fn attention(dtype: DType) -> Graph {
    let outlier = || {
        let mut values = [0f32; 16];
        values[0] = 300.0;
        Tensor::from_elements(vec![16], &values).unwrap()
    };
    // The large channel is exact in f16, so any difference comes from the arithmetic of the scores.
    let projection = |seed| {
        let mut values = scaled(&[16, 16], seed, 0.5).to_f32s().unwrap();
        values.iter_mut().step_by(16).for_each(|v| *v = 0.0);
        Tensor::from_elements(vec![16, 16], &values).unwrap()
    };
    Block::new(dtype, "1 8 16")
        .weight("wq", projection(1))
        .weight("wk", projection(2))
        .weight("wv", noise(&[16, 16], 3))
        .weight("bq", outlier())
        .weight("bk", outlier())
        .weight("scale", Tensor::scalar(0.25f32))
        .node("MatMul", &[X, "wq"], "xq")
        .node("Add", &["xq", "bq"], "q")
        .node("MatMul", &[X, "wk"], "xk")
        .node("Add", &["xk", "bk"], "k")
        .node_with("Transpose", &["k"], "kt", [("perm", Attribute::Ints(vec![0, 2, 1]))])
        .node("MatMul", &["q", "kt"], "product")
        .node("Mul", &["product", "scale"], "scores")
        .node_with("Softmax", &["scores"], "p", [("axis", Attribute::Int(-1))])
        .node("MatMul", &[X, "wv"], "v")
        .node("MatMul", &["p", "v"], "y")
        .graph("1 8 16")
}

/// The feed-forward part of a T5 block: `wo` produces values of 100,000 from gated ones of some hundreds.
fn t5(dtype: DType) -> Graph {
    Block::new(dtype, "1 4 16")
        .rms_norm(X, "n")
        .weight("wi_0", scaled(&[16, 32], 2, 12.0))
        .weight("wi_1", scaled(&[16, 32], 3, 12.0))
        .weight("wo", scaled(&[32, 16], 4, 400.0))
        .node("MatMul", &["n", "wi_0"], "i")
        .node("MatMul", &["n", "wi_1"], "linear")
        .silu("i", "gate")
        .node("Mul", &["gate", "linear"], "gated")
        .node("MatMul", &["gated", "wo"], "o")
        .node("Add", &[X, "o"], "stream")
        .rms_norm("stream", "y")
        .graph("1 4 16")
}

/// A gated branch, as in Flux: neither factor is large, but their product is.
fn gated(dtype: DType) -> Graph {
    Block::new(dtype, "1 4 16")
        .weight("w", scaled(&[16, 16], 1, 600.0))
        .weight("wg", scaled(&[16, 16], 2, 600.0))
        .node("MatMul", &[X, "w"], "branch")
        .node("MatMul", &[X, "wg"], "gate")
        .node("Mul", &["gate", "branch"], "gated")
        .node("Add", &[X, "gated"], "stream")
        .weight("gamma", noise(&[16], 3))
        .weight("beta", noise(&[16], 4))
        .node_with("LayerNormalization", &["stream", "gamma", "beta"], "y", [("axis", Attribute::Int(-1))])
        .graph("1 4 16")
}

/// An up block of a VAE: its residual branch, and the upsampler that reads the stream.
fn vae(dtype: DType) -> Graph {
    let padded = || [("pads", Attribute::Ints(vec![1; 4]))];
    let name = |part: &str| format!("decoder.up_blocks.3.{part}");
    let norm = |block: Block, x: &str, at: &str, y: &str| {
        let [weight, bias] = [format!("{at}.weight"), format!("{at}.bias")];
        let [shape, normed, back, scaled_up, shifted] =
            ["groups", "normed", "back", "scaled", "shifted"].map(|part| format!("{y}.{part}"));
        let (groups, ones, zeros) = (format!("{y}.of_groups"), format!("{y}.ones"), format!("{y}.zeros"));
        block
            .ints(&shape, &[0, 2, -1])
            .ints(&back, &[1, 4, if x == "up" { 8 } else { 4 }, -1])
            .weight(&ones, Tensor::from_elements(vec![2], &[1f32; 2]).unwrap())
            .weight(&zeros, Tensor::from_elements(vec![2], &[0f32; 2]).unwrap())
            .weight(&weight, noise(&[4, 1, 1], 11))
            .weight(&bias, noise(&[4, 1, 1], 12))
            .node("Reshape", &[x, &shape], &groups)
            .node("InstanceNormalization", &[&groups, &ones, &zeros], &normed)
            .node("Reshape", &[&normed, &back], &format!("{y}.image"))
            .node("Mul", &[&format!("{y}.image"), &weight], &scaled_up)
            .node("Add", &[&scaled_up, &bias], &shifted)
            .silu(&shifted, y)
    };
    let block = Block::new(dtype, "1 4 4 4");
    norm(block, X, &name("resnets.0.norm1"), "n")
        .weight(&name("resnets.0.conv1.weight"), scaled(&[4, 4, 3, 3], 1, 100_000.0 / 2.0))
        .node_with("Conv", &["n", &name("resnets.0.conv1.weight")], "h", padded())
        .node("Add", &[X, "h"], "stream")
        .weight("doubled", Tensor::from_elements(vec![4], &[1f32, 1.0, 2.0, 2.0]).unwrap())
        .node("Resize", &["stream", "", "doubled"], "large")
        .weight(&name("upsamplers.0.conv.weight"), noise(&[4, 4, 3, 3], 2))
        .node_with("Conv", &["large", &name("upsamplers.0.conv.weight")], "up", padded())
        .then(|block| norm(block, "up", "decoder.conv_norm_out", "last"))
        .weight("decoder.conv_out.weight", noise(&[3, 4, 3, 3], 3))
        .node_with("Conv", &["last", "decoder.conv_out.weight"], "y", padded())
        .graph("1 3 8 8")
}

impl Block {
    fn then(self, next: impl FnOnce(Self) -> Self) -> Self {
        next(self)
    }
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0f32, |most, v| most.max(v.abs()))
}

/// A model, its value beyond f16's range, and some values that must be in f32 and in f16.
struct Case {
    what: &'static str,
    build: fn(DType) -> Graph,
    large: &'static str,
    wide: &'static [&'static str],
    narrow: &'static [&'static str],
}

#[test]
fn outliers_stay_finite_in_half_precision() {
    let cases = [
        Case {
            what: "attention",
            build: attention,
            large: "product",
            wide: &["product", "scores", "p"],
            narrow: &["q", "k", "v", "wv"],
        },
        Case {
            what: "t5",
            build: t5,
            large: "stream",
            wide: &["o", "stream", "wo"],
            narrow: &["i", "gated", "wi_0"],
        },
        Case {
            what: "gated",
            build: gated,
            large: "stream",
            wide: &["gated", "stream"],
            narrow: &["branch", "gate", "w", "wg"],
        },
        Case { what: "vae", build: vae, large: "stream", wide: &["h", "large", "up", "last"], narrow: &[] },
    ];
    for Case { what, build, large, wide, narrow } in cases {
        let full = build(DType::F32);
        let shape = full.value(full.inputs[0]).known_shape().unwrap();
        let x = noise(&shape, 5);
        let expected = run(&full, &[(X, x.clone())])[0].to_f32s().unwrap();
        let mut probe = full.clone();
        probe.outputs = vec![probe.find(large).unwrap()];
        assert!(
            largest(&run(&probe, &[(X, x.clone())])[0].to_f32s().unwrap()) > 65504.0,
            "{what}: no outlier"
        );

        for given in [DType::F32, DType::F16] {
            let original = build(given);
            let mut graph = original.clone();
            let report = convert_precision(&mut graph, DType::F16);
            // Every weight keeps its name and shape.
            let weights = |graph: &Graph| -> Vec<(String, Vec<usize>)> {
                graph.weights().map(|(name, w)| (name.to_owned(), w.shape.clone())).collect()
            };
            assert_eq!(weights(&graph), weights(&original), "{what}");
            let found = run(&filled(&original, &graph), &[(X, x.to_float_type(given).unwrap())]);
            assert_eq!(found[0].dtype(), given);
            let found = found[0].to_f32s().unwrap();
            let worst = found.iter().zip(&expected).fold(0f32, |w, (f, e)| {
                if w.is_nan() {
                    w
                } else {
                    let error = (f - e).abs();
                    if error.is_nan() { error } else { w.max(error) }
                }
            });
            let limit = 8e-3 * largest(&expected);
            assert!(worst <= limit, "{what} from {given}: {worst} of {}, {report:?}", largest(&expected));
            let dtype = |name: &str| dtype_of(&graph, name);
            wide.iter().for_each(|name| assert_eq!(dtype(name), DType::F32, "{what} from {given}: {name}"));
            narrow.iter().for_each(|name| assert_eq!(dtype(name), DType::F16, "{what} from {given}: {name}"));
        }
    }
}

#[test]
fn bf16_has_enough_range() {
    for (build, narrow) in [(t5 as fn(DType) -> Graph, "o"), (gated, "stream"), (vae, "h")] {
        let mut graph = build(DType::F32);
        convert_precision(&mut graph, DType::BF16);
        assert_eq!(dtype_of(&graph, narrow), DType::BF16);
    }
    let mut graph = attention(DType::F32);
    convert_precision(&mut graph, DType::BF16);
    assert_eq!(
        dtype_of(&graph, "scores"),
        DType::F32,
        "8 bits are too few for the argument of an exponential"
    );
}
