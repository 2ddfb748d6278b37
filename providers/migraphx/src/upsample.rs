//! Upsampling by integer factors.

use sdrun_abi::DType;
use sdrun_graph::{Attribute, Dim, Graph, Initializer, Node, Tensor, Value, ValueId};
use std::collections::BTreeMap;

/// Replaces a `Resize` that repeats every element an integer number of times with `Reshape`, `Expand`, `Reshape`.
/// MIGraphX 2.14 turns such a `Resize` into a table of the source position of every output element and stores it in
/// the program: 436 MB for the decoder of a 512x512 image.
pub(crate) fn spell_out_upsampling(graph: &mut Graph) {
    for node in std::mem::take(&mut graph.nodes) {
        match repeats(graph, &node) {
            Some((x, y, shape, factors)) => repeat(graph, &node, [x, y], &shape, &factors),
            None => graph.nodes.push(node),
        }
    }
}

/// Input, output, input shape, and the number of repetitions along each axis.
fn repeats(graph: &Graph, node: &Node) -> Option<(ValueId, ValueId, Vec<usize>, Vec<usize>)> {
    let text = |name: &str, default: &'static str| match node.attributes.get(name) {
        None => default.to_string(),
        Some(Attribute::String(value)) => String::from_utf8_lossy(value).into_owned(),
        Some(_) => String::new(),
    };
    let places = text("coordinate_transformation_mode", "half_pixel");
    let rounding = text("nearest_mode", "round_prefer_floor");
    // With an integer factor n, both modes read element floor(i/n) for output position i.
    let whole = [("asymmetric", "floor"), ("half_pixel", "round_prefer_floor")];
    let nearest = node.op_type == "Resize" && node.domain.is_empty() && text("mode", "nearest") == "nearest";
    if !nearest || !whole.contains(&(&*places, &*rounding)) || node.attributes.contains_key("axes") {
        return None;
    }
    let (x, y) = (node.input(0)?, node.output(0)?);
    let (shape, result) = (graph.value(x).known_shape()?, graph.value(y).known_shape()?);
    let factors: Vec<usize> =
        shape.iter().zip(&result).map(|(from, to)| to.checked_div(*from)).collect::<Option<_>>()?;
    let exact = shape.len() == result.len()
        && shape.iter().zip(&factors).map(|(d, n)| d * n).eq(result)
        && !factors.contains(&0);
    let scales = node.input(2).map(|id| graph.constant(id)?.to_f32s());
    let stated = match scales {
        Some(scales) => {
            let scales = scales?;
            scales.is_empty() || scales.iter().map(|s| f64::from(*s)).eq(factors.iter().map(|n| *n as f64))
        }
        None => true,
    };
    (exact && stated).then_some((x, y, shape, factors))
}

fn repeat(graph: &mut Graph, like: &Node, [x, y]: [ValueId; 2], shape: &[usize], factors: &[usize]) {
    let (mut split, mut spread) = (Vec::new(), Vec::new());
    for (size, factor) in shape.iter().zip(factors) {
        split.push(*size);
        spread.push(*size);
        if *factor > 1 {
            split.push(1);
            spread.push(*factor);
        }
    }
    let result: Vec<usize> = shape.iter().zip(factors).map(|(size, factor)| size * factor).collect();
    let mut from = x;
    for (index, (op, dims)) in
        [("Reshape", split), ("Expand", spread), ("Reshape", result)].into_iter().enumerate()
    {
        let (name, dtype) = (format!("{}/repeated/{index}", graph.value(y).name), graph.value(x).dtype);
        let known = |dims: &[usize]| Some(dims.iter().map(|d| Dim::Known(*d)).collect());
        let target = Tensor::from_i64s(&dims.iter().map(|d| *d as i64).collect::<Vec<_>>());
        let to = graph.add_value(Value {
            name: format!("{name}/shape"),
            dtype: Some(DType::I64),
            shape: known(&[dims.len()]),
        });
        graph.initializers.insert(to, Initializer::Constant(target));
        let output = match index {
            2 => y,
            _ => graph.add_value(Value { name: name.clone(), dtype, shape: known(&dims) }),
        };
        graph.nodes.push(Node {
            name,
            domain: String::new(),
            op_type: op.into(),
            inputs: vec![Some(from), Some(to)],
            outputs: vec![Some(output)],
            attributes: BTreeMap::new(),
            metadata: like.metadata.clone(),
        });
        from = output;
    }
}
