use super::{
    prepare_weights::made_of_weights,
    rewrite::{Fresh, node, rewrite},
    uses::{Uses, is_op},
};
use crate::{Dim, Graph, Node, Tensor, ValueId, infer::dims::known};
use std::collections::BTreeSet;

/// Folds each BatchNormalization into the weights of the Conv before it, where nothing else reads the result of the Conv.
///
/// The weights stay replaceable: new nodes compute `weight * scale / sqrt(variance + epsilon)` and the matching bias, and
/// [`prepare_weights`](super::prepare_weights) moves these nodes out of the graph. Values that it can move out count as
/// weights. Compilers fold by themselves where weights are constants. Shapes must have been inferred. Returns the number of
/// nodes folded.
pub fn fold_batch_norms(graph: &mut Graph) -> usize {
    if !graph.nodes.iter().any(|n| is_op(n, "BatchNormalization")) {
        return 0;
    }
    let made = made_of_weights(graph);
    rewrite(graph, |uses, fresh, n| folded(uses, fresh, n, &made))
}

fn folded(uses: &Uses<'_>, fresh: &mut Fresh, n: &Node, made: &BTreeSet<ValueId>) -> Option<Vec<Node>> {
    let stated = n.int_or("training_mode", 0) == 0 && n.outputs.iter().flatten().count() == 1;
    // Before opset 9, one variance for each element of an image.
    let by_channel = n.int_or("spatial", 1) == 1;
    (is_op(n, "BatchNormalization") && stated && by_channel).then_some(())?;
    let conv = uses.made_once_by(n.input(0)?, "Conv")?;
    let (weight, bias) = (conv.input(1)?, conv.input(2));
    let [scale, offset, mean, variance] = [n.input(1)?, n.input(2)?, n.input(3)?, n.input(4)?];
    let shape = uses.graph.value(weight).known_shape().filter(|_| made.contains(&weight))?;
    let (&channels, dtype) = (shape.first()?, uses.dtype(weight)?);
    let vector = vec![Dim::Known(channels)];
    let fits =
        |id: ValueId| made.contains(&id) && uses.shape(id) == Some(&vector) && uses.dtype(id) == Some(dtype);
    [scale, offset, mean, variance].into_iter().chain(bias).all(fits).then_some(())?;

    let epsilon = Tensor::scalar(n.float("epsilon").unwrap_or(1e-5)).to_float_type(dtype)?;
    let epsilon = fresh.constant(epsilon);
    let column: Vec<usize> = [channels].into_iter().chain(shape[1..].iter().map(|_| 1)).collect();
    let column_shape = fresh.shape(&column.iter().map(|d| *d as i64).collect::<Vec<_>>());
    let mut nodes = Vec::new();
    let mut add = |fresh: &mut Fresh, op: &str, inputs: &[ValueId], dims: &[usize]| {
        let made = fresh.value(Some(dtype), Some(known(dims)));
        nodes.push(node(n, op, inputs, Some(made), []));
        made
    };
    let sum = add(fresh, "Add", &[variance, epsilon], &[channels]);
    let deviation = add(fresh, "Sqrt", &[sum], &[channels]);
    let factor = add(fresh, "Div", &[scale, deviation], &[channels]);
    let factors = add(fresh, "Reshape", &[factor, column_shape], &column);
    let weight = add(fresh, "Mul", &[weight, factors], &shape);
    let centred = match bias {
        Some(bias) => add(fresh, "Sub", &[bias, mean], &[channels]),
        None => add(fresh, "Neg", &[mean], &[channels]),
    };
    let scaled = add(fresh, "Mul", &[centred, factor], &[channels]);
    let bias = add(fresh, "Add", &[scaled, offset], &[channels]);
    let inputs = vec![conv.inputs[0], Some(weight), Some(bias)];
    nodes.push(Node { inputs, outputs: n.outputs.clone(), ..conv.clone() });
    Some(nodes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Attribute, Initializer, OpenDims,
        passes::{
            Prepare, prepare_weights,
            testing::{check, noise, ops},
        },
        simplify,
        testing::{Model, model, run},
    };
    use sdrun_abi::DType;
    use std::collections::BTreeMap;

    fn positive(seed: u32) -> Tensor {
        let values: Vec<f32> = noise(&[4], seed).to_f32s().unwrap().iter().map(|v| v.abs() + 0.1).collect();
        Tensor::from_elements(vec![4], &values).unwrap()
    }

    fn normalized(bias: bool) -> Model {
        let inputs: &[&str] = if bias { &["x", "w", "b"] } else { &["x", "w"] };
        let file = model(17)
            .input("x", DType::F32, "n 3 h 5")
            .initializer("w", &noise(&[4, 3, 3, 3], 1))
            .initializer("b", &noise(&[4], 2))
            .initializer("scale", &noise(&[4], 3))
            .initializer("offset", &noise(&[4], 4))
            .initializer("mean", &noise(&[4], 5))
            .initializer("variance", &positive(6));
        file.node_with("Conv", inputs, &["c"], [("pads", Attribute::Ints(vec![1; 4]))])
            .node_with(
                "BatchNormalization",
                &["c", "scale", "offset", "mean", "variance"],
                &["norm"],
                [("epsilon", Attribute::Float(1e-3))],
            )
            .node("Relu", &["norm"], &["y"])
            .output("y", "n 4 h 5")
    }

    #[test]
    fn a_norm_goes_into_the_convolution_before_it() {
        for bias in [false, true] {
            let graph = check(&normalized(bias), fold_batch_norms, 1);
            assert_eq!(ops(&graph)[8..], ["Conv", "Relu"], "{:?}", ops(&graph));
        }
        // What somebody else reads stays.
        check(&normalized(true).output("c", "n 4 h 5"), fold_batch_norms, 0);
        let mut training = normalized(true);
        training.graph_mut().node[1]
            .attribute
            .push(crate::testing::attribute("training_mode", Attribute::Int(1)));
        let mut graph = training.graph();
        crate::infer::infer_shapes(&mut graph).unwrap();
        assert_eq!(fold_batch_norms(&mut graph), 0);
    }

    #[test]
    fn the_arithmetic_is_taken_out_and_the_weights_stay_weights() {
        let mut graph = normalized(true).graph();
        let shapes = BTreeMap::from([("x".to_owned(), vec![2, 3, 6, 5])]);
        simplify(&mut graph, &shapes, OpenDims::Refuse).unwrap();
        let x = noise(&[2, 3, 6, 5], 9);
        let expected = run(&graph, &[("x", x.clone())]);
        assert_eq!(fold_batch_norms(&mut graph), 1);
        let preparation = prepare_weights(&mut graph, Prepare::Arithmetic);
        assert_eq!(ops(&graph), ["Conv", "Relu"]);
        assert_eq!(preparation.weights().count(), 6);
        for (id, tensor) in preparation.outputs.iter().zip(run(&preparation, &[])) {
            let id = graph.find(&preparation.value(*id).name).unwrap();
            graph.initializers.insert(id, Initializer::Constant(tensor));
        }
        let found = run(&graph, &[("x", x)]);
        let error = |a: &[f32], b: &[f32]| a.iter().zip(b).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
        let error = error(&found[0].to_f32s().unwrap(), &expected[0].to_f32s().unwrap());
        assert!(error < 1e-5, "{error}");
    }
}
