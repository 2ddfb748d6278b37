use crate::{Graph, Initializer};

/// Turns every weight into an input of the graph, after the existing inputs, in the order of [`Graph::weights`].
/// Constants stay. Names and types do not change. An engine built from the result holds no weights: the caller binds
/// any weights as inputs, and the compiler loses its optimizations for constants.
///
/// Returns the number of weights.
pub fn weights_as_inputs(graph: &mut Graph) -> usize {
    let weights: Vec<_> = graph
        .initializers
        .iter()
        .filter(|(_, initializer)| matches!(initializer, Initializer::Weight(_)))
        .map(|(id, _)| *id)
        .collect();
    for id in &weights {
        graph.initializers.remove(id);
    }
    graph.inputs.extend(&weights);
    weights.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dim, Tensor, Value, WeightData, WeightRef};
    use sdrun_abi::DType;

    #[test]
    fn weights_follow_the_inputs_and_constants_stay() {
        let mut graph = Graph::default();
        let mut value = |name: &str| {
            graph.add_value(Value {
                name: name.into(),
                dtype: Some(DType::F32),
                shape: Some(vec![Dim::Known(2)]),
            })
        };
        let (weight, constant, input) = (value("w"), value("c"), value("x"));
        let data = WeightData::Absent { location: "w".into(), offset: 0 };
        let place = WeightRef { dtype: DType::F32, shape: vec![2], data };
        graph.initializers.insert(weight, Initializer::Weight(place));
        let tensor = Tensor::from_elements(vec![2], &[1.0f32, 2.0]).unwrap();
        graph.initializers.insert(constant, Initializer::Constant(tensor));
        graph.inputs.push(input);
        assert_eq!(weights_as_inputs(&mut graph), 1);
        assert_eq!(graph.inputs, [input, weight]);
        assert_eq!(graph.weights().count(), 0);
        assert!(graph.constant(constant).is_some());
    }
}
