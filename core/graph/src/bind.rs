//! Binds the open dimensions of a graph's inputs to sizes.

use crate::{Dim, Graph, GraphError, Value};
use std::collections::BTreeMap;

/// How to treat input dimensions that no binding fixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenDims {
    /// Report an error.
    Refuse,
    /// Leave them open.
    Allow,
}

impl Graph {
    /// Fixes the shapes of inputs, by name. A symbol (`batch`) that gets a size in one input gets it in all inputs.
    /// Shapes inside the graph and of its outputs need [`infer_shapes`](crate::infer::infer_shapes) afterwards.
    ///
    /// # Errors
    /// [`GraphError::Invalid`] if a name is not an input, a shape contradicts the input's declared shape, a symbol
    /// gets two sizes, or (with [`OpenDims::Refuse`]) a dimension stays open. The graph is unchanged on error.
    pub fn bind(&mut self, shapes: &BTreeMap<String, Vec<usize>>, open: OpenDims) -> Result<(), GraphError> {
        let mut symbols: BTreeMap<&str, (usize, &str)> = BTreeMap::new();
        for (name, shape) in shapes {
            let Some(input) = self.inputs.iter().map(|id| self.value(*id)).find(|input| input.name == *name)
            else {
                let known: Vec<&str> = self.inputs.iter().map(|id| self.value(*id).name.as_str()).collect();
                return Err(GraphError::Invalid(format!(
                    "the graph has no input {name:?}; its inputs are {known:?}"
                )));
            };
            let refuse = |why: &str| {
                GraphError::Invalid(format!(
                    "input {} does not accept the shape {shape:?}: {why}",
                    describe(input)
                ))
            };
            let Some(dims) = &input.shape else { continue };
            if dims.len() != shape.len() {
                return Err(refuse(&format!("it has {} dimensions", dims.len())));
            }
            for (i, (dim, size)) in dims.iter().zip(shape).enumerate() {
                match dim {
                    Dim::Known(fixed) if fixed != size => {
                        return Err(refuse(&format!("dimension {i} is fixed to {fixed}")));
                    }
                    Dim::Known(_) | Dim::Unknown => {}
                    Dim::Symbol(symbol) => match symbols.get(symbol.as_str()) {
                        Some((other, by)) if other != size => {
                            return Err(refuse(&format!("{symbol:?} is {other} for input {by:?}")));
                        }
                        _ => {
                            symbols.insert(symbol, (*size, name));
                        }
                    },
                }
            }
        }

        let bound: Vec<Option<Vec<Dim>>> = self
            .inputs
            .iter()
            .map(|id| self.value(*id))
            .map(|input| match shapes.get(&input.name) {
                Some(shape) => Some(shape.iter().map(|d| Dim::Known(*d)).collect()),
                None => input
                    .shape
                    .as_ref()
                    .map(|dims| dims.iter().map(|dim| substitute(dim, &symbols)).collect()),
            })
            .collect();
        if open == OpenDims::Refuse {
            let is_open = |shape: &Option<Vec<Dim>>| {
                !shape.as_ref().is_some_and(|dims| dims.iter().all(|d| d.known().is_some()))
            };
            let unbound = self.inputs.iter().zip(&bound).filter(|(_, shape)| is_open(shape));
            let list: Vec<String> = unbound.map(|(id, _)| describe(self.value(*id))).collect();
            if !list.is_empty() {
                return Err(GraphError::Invalid(format!("these inputs need a shape: {}", list.join(", "))));
            }
        }
        for (id, shape) in self.inputs.clone().into_iter().zip(bound) {
            self.value_mut(id).shape = shape;
        }
        Ok(())
    }
}

fn substitute(dim: &Dim, symbols: &BTreeMap<&str, (usize, &str)>) -> Dim {
    match dim {
        Dim::Symbol(symbol) => {
            symbols.get(symbol.as_str()).map_or(dim.clone(), |(size, _)| Dim::Known(*size))
        }
        _ => dim.clone(),
    }
}

/// Name and shape: `sample [batch, 4, height, width]`.
fn describe(value: &Value) -> String {
    let dim = |dim: &Dim| match dim {
        Dim::Known(n) => n.to_string(),
        Dim::Symbol(name) => name.clone(),
        Dim::Unknown => "?".into(),
    };
    match &value.shape {
        Some(dims) => format!("{:?} [{}]", value.name, dims.iter().map(dim).collect::<Vec<_>>().join(", ")),
        None => format!("{:?} (of any rank)", value.name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::model;
    use sdrun_abi::DType;

    fn graph() -> Graph {
        model(17)
            .input("sample", DType::F32, "batch 4 height ?")
            .input("timestep", DType::I64, "batch")
            .input("strength", DType::F32, "")
            .node("Shape", &["sample"], &["y"])
            .output("y", "batch")
            .graph()
    }

    fn shapes(pairs: &[(&str, &[usize])]) -> BTreeMap<String, Vec<usize>> {
        pairs.iter().map(|(name, shape)| (name.to_string(), shape.to_vec())).collect()
    }

    fn error(pairs: &[(&str, &[usize])], open: OpenDims) -> String {
        let (mut bound, before) = (graph(), graph());
        let error = bound.bind(&shapes(pairs), open).unwrap_err().to_string();
        assert_eq!(bound, before, "an error changes nothing");
        error
    }

    #[test]
    fn symbols_reach_the_other_inputs() {
        let mut graph = graph();
        graph.bind(&shapes(&[("sample", &[2, 4, 64, 48])]), OpenDims::Refuse).unwrap();
        let known: Vec<_> = graph.inputs.iter().map(|id| graph.value(*id).known_shape()).collect();
        assert_eq!(known, [Some(vec![2, 4, 64, 48]), Some(vec![2]), Some(vec![])]);
        graph.bind(&shapes(&[("sample", &[2, 4, 64, 48])]), OpenDims::Refuse).unwrap();
    }

    #[test]
    fn contradictions_are_named() {
        let refused = error(&[("sample", &[2, 3, 64, 64])], OpenDims::Allow);
        assert_eq!(
            refused,
            "input \"sample\" [batch, 4, height, ?] does not accept the shape [2, 3, 64, 64]: dimension 1 is fixed to 4"
        );
        assert!(error(&[("sample", &[2, 4, 64])], OpenDims::Allow).contains("it has 4 dimensions"));
        assert!(error(&[("strength", &[1])], OpenDims::Allow).contains("it has 0 dimensions"));
        let unknown = error(&[("smaple", &[1])], OpenDims::Allow);
        assert!(unknown.contains("\"smaple\"") && unknown.contains("timestep"), "{unknown}");
        let two = error(&[("sample", &[2, 4, 8, 8]), ("timestep", &[3])], OpenDims::Allow);
        assert!(two.contains("\"batch\" is 2 for input \"sample\""), "{two}");
    }

    #[test]
    fn open_dimensions_need_permission() {
        let open = error(&[("timestep", &[2])], OpenDims::Refuse);
        assert_eq!(open, "these inputs need a shape: \"sample\" [batch, 4, height, ?]");
        let mut graph = graph();
        graph.bind(&shapes(&[("timestep", &[2])]), OpenDims::Allow).unwrap();
        let sample = graph.value(graph.inputs[0]).shape.clone().unwrap();
        assert_eq!(sample, [Dim::Known(2), Dim::Known(4), Dim::Symbol("height".into()), Dim::Unknown]);
    }
}
