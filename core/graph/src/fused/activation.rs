use crate::{Attribute, Node};
use std::collections::BTreeMap;

/// A function applied to each element of a result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// max(x, 0): `Relu`.
    Relu,
    /// min(max(x, low), high): `Clip` with the parameters low and high.
    Clip(f32, f32),
    /// x · sigmoid(alpha · x): `Swish` with the parameter alpha, which is 1 for SiLU and 1.702 for CLIP's "quick GELU".
    Swish(f32),
    /// x · Φ(x): `Gelu`.
    Gelu,
    /// The tanh approximation of GELU: `FastGelu`.
    GeluTanh,
}

const NAME: &str = "activation";
const PARAMETERS: &str = "activation_params";

impl Activation {
    /// The activation that a node's attributes name.
    ///
    /// # Errors
    /// An unknown name or a wrong number of parameters.
    pub fn of(node: &Node) -> Result<Option<Self>, String> {
        if !node.attributes.contains_key(NAME) {
            return Ok(None);
        }
        let parameters = node.floats(PARAMETERS).unwrap_or_default();
        Ok(Some(match (node.str(NAME).unwrap_or_default(), parameters) {
            ("Relu", []) => Activation::Relu,
            ("Clip", &[low, high]) => Activation::Clip(low, high),
            ("Swish", &[alpha]) => Activation::Swish(alpha),
            ("Gelu", []) => Activation::Gelu,
            ("FastGelu", []) => Activation::GeluTanh,
            (name, _) => {
                return Err(format!("activation {name:?} with parameters {parameters:?} is unknown"));
            }
        }))
    }

    /// Writes it to a node's attributes.
    pub fn write(&self, attributes: &mut BTreeMap<String, Attribute>) {
        let (name, parameters) = match *self {
            Activation::Relu => ("Relu", vec![]),
            Activation::Clip(low, high) => ("Clip", vec![low, high]),
            Activation::Swish(alpha) => ("Swish", vec![alpha]),
            Activation::Gelu => ("Gelu", vec![]),
            Activation::GeluTanh => ("FastGelu", vec![]),
        };
        attributes.insert(NAME.into(), Attribute::String(name.into()));
        if !parameters.is_empty() {
            attributes.insert(PARAMETERS.into(), Attribute::Floats(parameters));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_activations_read_back() {
        let mut node = Node {
            name: String::new(),
            domain: super::super::DOMAIN.into(),
            op_type: "FusedConv".into(),
            inputs: vec![],
            outputs: vec![],
            attributes: BTreeMap::new(),
            metadata: BTreeMap::new(),
        };
        assert_eq!(Activation::of(&node), Ok(None));
        use Activation::*;
        for activation in [Relu, Clip(0.0, 6.0), Swish(1.702), Gelu, GeluTanh] {
            node.attributes.clear();
            activation.write(&mut node.attributes);
            assert_eq!(Activation::of(&node), Ok(Some(activation)));
        }
        node.attributes.insert(NAME.into(), Attribute::String(b"Softmax".to_vec()));
        assert!(Activation::of(&node).unwrap_err().contains("Softmax"));
    }
}
