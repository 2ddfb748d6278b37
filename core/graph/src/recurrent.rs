//! The attributes of LSTM, GRU and RNN.

use crate::Node;

/// The domain of ONNX Runtime's additions to ai.onnx.
pub const MICROSOFT: &str = "com.microsoft";

/// Which recurrence a node computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Gates in the order input, output, forget, cell.
    Lstm,
    /// Gates in the order update, reset, hidden.
    Gru,
    /// One gate.
    Rnn,
}

impl Kind {
    /// The kind of a recurrent node, `None` for others: an operator of ai.onnx or ONNX Runtime's
    /// `DynamicQuantizeLSTM`.
    pub fn of(node: &Node) -> Option<Self> {
        match (&*node.domain, &*node.op_type) {
            ("" | "ai.onnx", "LSTM") | (MICROSOFT, "DynamicQuantizeLSTM") => Some(Kind::Lstm),
            ("" | "ai.onnx", "GRU") => Some(Kind::Gru),
            ("" | "ai.onnx", "RNN") => Some(Kind::Rnn),
            _ => None,
        }
    }
    /// Number of gates per unit.
    pub fn gates(self) -> usize {
        match self {
            Kind::Lstm => 4,
            Kind::Gru => 3,
            Kind::Rnn => 1,
        }
    }
    /// Default activations of one direction.
    fn defaults(self) -> &'static [&'static str] {
        match self {
            Kind::Lstm => &["Sigmoid", "Tanh", "Tanh"],
            Kind::Gru => &["Sigmoid", "Tanh"],
            Kind::Rnn => &["Tanh"],
        }
    }
}

/// An activation with its parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Function {
    /// `alpha * x + beta`.
    Affine(f32, f32),
    Elu(f32),
    HardSigmoid(f32, f32),
    LeakyRelu(f32),
    Relu,
    /// `alpha * tanh(beta * x)`.
    ScaledTanh(f32, f32),
    Sigmoid,
    Softplus,
    Softsign,
    Tanh,
    ThresholdedRelu(f32),
}

impl Function {
    /// The function with this name, case-insensitive like in ONNX Runtime. Parameters are taken from the front of
    /// `alpha` and `beta`. When those run out, ONNX's default for the function applies, or ONNX Runtime's where ONNX
    /// has none.
    fn parse(name: &str, alpha: &mut &[f32], beta: &mut &[f32]) -> Option<Self> {
        let take = |list: &mut &[f32], default: f32| match list.split_first() {
            Some((first, rest)) => {
                *list = rest;
                *first
            }
            None => default,
        };
        Some(match &*name.to_ascii_lowercase() {
            "affine" => Function::Affine(take(alpha, 1.0), take(beta, 0.0)),
            "elu" => Function::Elu(take(alpha, 1.0)),
            "hardsigmoid" => Function::HardSigmoid(take(alpha, 0.2), take(beta, 0.5)),
            "leakyrelu" => Function::LeakyRelu(take(alpha, 0.01)),
            "relu" => Function::Relu,
            "scaledtanh" => Function::ScaledTanh(take(alpha, 1.0), take(beta, 1.0)),
            "sigmoid" => Function::Sigmoid,
            "softplus" => Function::Softplus,
            "softsign" => Function::Softsign,
            "tanh" => Function::Tanh,
            "thresholdedrelu" => Function::ThresholdedRelu(take(alpha, 1.0)),
            _ => return None,
        })
    }

    /// The value at `x`.
    pub fn at(self, x: f64) -> f64 {
        match self {
            Function::Affine(alpha, beta) => f64::from(alpha) * x + f64::from(beta),
            Function::Elu(alpha) if x < 0.0 => f64::from(alpha) * x.exp_m1(),
            Function::HardSigmoid(alpha, beta) => (f64::from(alpha) * x + f64::from(beta)).clamp(0.0, 1.0),
            Function::LeakyRelu(alpha) if x < 0.0 => f64::from(alpha) * x,
            Function::Relu if x < 0.0 => 0.0,
            Function::ScaledTanh(alpha, beta) => f64::from(alpha) * (f64::from(beta) * x).tanh(),
            Function::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            Function::Softplus => x.max(0.0) + (-x.abs()).exp().ln_1p(),
            Function::Softsign => x / (1.0 + x.abs()),
            Function::Tanh => x.tanh(),
            Function::ThresholdedRelu(alpha) if x <= f64::from(alpha) => 0.0,
            Function::Elu(_) | Function::LeakyRelu(_) | Function::Relu | Function::ThresholdedRelu(_) => x,
        }
    }
}

/// The attributes of a recurrent node.
#[derive(Clone, Debug, PartialEq)]
pub struct Recurrence {
    /// The recurrence.
    pub kind: Kind,
    /// For each direction, whether it runs from the end to the start.
    pub reversed: Vec<bool>,
    /// For each direction, its activations: `f`, `g` and `h` of ONNX's definition, as many as the kind has.
    pub functions: Vec<Vec<Function>>,
    /// Bound on the magnitude of the activations' inputs.
    pub clip: Option<f32>,
    /// Number of units, if the node states it.
    pub hidden: Option<usize>,
    /// Whether the batch is the first dimension of inputs and outputs.
    pub batch_first: bool,
    /// LSTM: the forget gate is one minus the input gate.
    pub input_forget: bool,
    /// GRU: the reset gate multiplies the product with the hidden state instead of the hidden state itself.
    pub linear_before_reset: bool,
}

impl Recurrence {
    /// Reads the attributes of a node; `None` if it is not recurrent.
    ///
    /// # Errors
    /// One clause about an attribute that violates ONNX's definition.
    pub fn of(node: &Node) -> Result<Option<Self>, String> {
        let Some(kind) = Kind::of(node) else { return Ok(None) };
        let reversed = match node.str("direction").unwrap_or("forward") {
            "forward" => vec![false],
            "reverse" => vec![true],
            "bidirectional" => vec![false, true],
            other => {
                return Err(format!("direction must be forward, reverse or bidirectional, not {other:?}"));
            }
        };
        let defaults = kind.defaults();
        let names: Vec<String> = match node.attributes.get("activations") {
            Some(crate::Attribute::Strings(names)) if !names.is_empty() => {
                names.iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect()
            }
            _ => reversed.iter().flat_map(|_| defaults).map(|name| (*name).to_owned()).collect(),
        };
        if names.len() != reversed.len() * defaults.len() {
            let wanted = reversed.len() * defaults.len();
            return Err(format!("it has {} activations but needs {wanted}", names.len()));
        }
        let mut alpha = node.floats("activation_alpha").unwrap_or_default();
        let mut beta = node.floats("activation_beta").unwrap_or_default();
        let parse = |name: &String| {
            Function::parse(name, &mut alpha, &mut beta)
                .ok_or_else(|| format!("activation {name:?} is not defined by ONNX"))
        };
        let functions: Vec<Function> = names.iter().map(parse).collect::<Result<_, _>>()?;
        let clip = node.float("clip").filter(|clip| *clip > 0.0);
        Ok(Some(Recurrence {
            kind,
            functions: functions.chunks(defaults.len()).map(<[_]>::to_vec).collect(),
            clip,
            hidden: node.int("hidden_size").and_then(|n| usize::try_from(n).ok()),
            batch_first: node.int_or("layout", 0) != 0,
            input_forget: node.int_or("input_forget", 0) != 0,
            linear_before_reset: node.int_or("linear_before_reset", 0) != 0,
            reversed,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Attribute;

    fn node(attributes: &[(&str, Attribute)]) -> Node {
        Node {
            name: String::new(),
            domain: String::new(),
            op_type: "LSTM".into(),
            inputs: vec![],
            outputs: vec![],
            attributes: attributes.iter().map(|(name, value)| (name.to_string(), value.clone())).collect(),
            metadata: Default::default(),
        }
    }

    #[test]
    fn parameters_go_to_the_activations_that_take_them() {
        let names = ["sigmoid", "LeakyRelu", "HardSigmoid"].map(|name| name.as_bytes().to_vec());
        let read = Recurrence::of(&node(&[
            ("activations", Attribute::Strings(names.to_vec())),
            ("activation_alpha", Attribute::Floats(vec![0.5])),
            ("activation_beta", Attribute::Floats(vec![0.25])),
        ]));
        let expected = [Function::Sigmoid, Function::LeakyRelu(0.5), Function::HardSigmoid(0.2, 0.25)];
        assert_eq!(read.unwrap().unwrap().functions, [expected]);
    }

    #[test]
    fn attributes_against_the_definition_are_refused() {
        let error = |name: &str, value: Attribute| Recurrence::of(&node(&[(name, value)])).unwrap_err();
        let text = |text: &str| Attribute::String(text.as_bytes().to_vec());
        assert!(error("direction", text("sideways")).contains("\"sideways\""));
        let names =
            |names: &[&str]| Attribute::Strings(names.iter().map(|n| n.as_bytes().to_vec()).collect());
        assert!(error("activations", names(&["Tanh"])).contains("needs 3"));
        assert!(error("activations", names(&["Tanh", "Tanh", "Sine"])).contains("\"Sine\""));
    }
}
