//! Outputs that stay on the device and become inputs there.

use super::{Model, compare, noise, provider, run, spec};
use crate::GgmlProvider;
use sdrun_abi::{
    BuildSpec, DType, DeviceTensor, ErrorCode, Input, NoHost, Precision, Provider, Session, TensorView,
    VecSink,
};
use sdrun_graph::{Attribute, Tensor};

/// Outputs a tensor unchanged, in two dimensions, transposed, as f16, and the index of the largest element of each row.
fn front() -> Model {
    let mut model = Model::new(17);
    let x = model.input(noise(&[1, 4, 6, 5], 1));
    let w = model.weight(noise(&[8, 4, 3, 3], 10));
    let y = model.node("Conv", &[("pads", Attribute::Ints(vec![1; 4]))], &[x, w]);
    let flat = model.constant(Tensor::from_i64s(&[8, 30]));
    let flat = model.node("Reshape", &[], &[y, flat]);
    let turned = model.node("Transpose", &[("perm", Attribute::Ints(vec![1, 0]))], &[flat]);
    let half = model.node("Cast", &[("to", Attribute::Int(DType::F16 as i64))], &[y]);
    let index =
        model.node("ArgMax", &[("axis", Attribute::Int(1)), ("keepdims", Attribute::Int(0))], &[flat]);
    [y, flat, turned, half, index].into_iter().for_each(|output| model.output(output));
    model
}

/// Reads all of them. It declares the two-dimensional tensor with four dimensions.
fn back() -> Model {
    let mut model = Model::new(17);
    let y = model.input(noise(&[1, 8, 6, 5], 2));
    let flat = model.input(noise(&[8, 30], 3));
    let turned = model.input(noise(&[30, 8], 4));
    let half = model.input(noise(&[1, 8, 6, 5], 5).to_float_type(DType::F16).unwrap());
    let index = model.input(Tensor::from_i64s(&[3, 1, 0, 2, 9, 29, 4, 4]));
    let square = model.node("MatMul", &[], &[flat, turned]);
    let half = model.node("Cast", &[("to", Attribute::Int(DType::F32 as i64))], &[half]);
    let sum = model.node("Add", &[], &[y, half]);
    let rows = model.node("Gather", &[("axis", Attribute::Int(1))], &[flat, index]);
    [square, sum, rows].into_iter().for_each(|output| model.output(output));
    model
}

fn read(tensor: &dyn DeviceTensor) -> Tensor {
    let spec = tensor.spec();
    let mut bytes = vec![0xff; spec.dtype.bytes_of(&spec.shape).unwrap()];
    tensor.read(&mut bytes).unwrap();
    Tensor::new(spec.dtype, spec.shape.clone(), bytes).unwrap()
}

fn view(tensor: &Tensor) -> Input<'_> {
    Input::Host(TensorView { dtype: tensor.dtype(), shape: tensor.shape(), data: tensor.data() })
}

fn brought(session: &mut dyn Session, inputs: &[Input<'_>], outputs: usize) -> Vec<Tensor> {
    let mut sink = VecSink::default();
    assert_eq!(session.run_on_device(inputs, &vec![false; outputs], &mut sink, &NoHost).unwrap().len(), 0);
    let views = (0..sink.len()).map(|i| sink.get(i).unwrap());
    views.map(|view| Tensor::new(view.dtype, view.shape.to_vec(), view.data.to_vec()).unwrap()).collect()
}

pub(super) fn stay_and_return(provider: &GgmlProvider, device: &str) {
    for precision in [Precision::Fp32, Precision::Fp16] {
        let spec = BuildSpec { device: device.into(), ..spec(precision) };
        assert!(provider.capabilities(device).unwrap().device_tensors);
        let session = |model: &Model| {
            let engine = provider.build(&model.onnx(), &spec, model, &NoHost).unwrap();
            engine.session(model, &NoHost).unwrap()
        };
        let (front, back) = (front(), back());
        let (mut one, mut other) = (session(&front), session(&back));
        let want = run(&mut *one, &front.feeds).unwrap();
        let x = view(&front.feeds[0]);
        let mut sink = VecSink::default();
        let mut kept = one.run_on_device(&[x], &[true; 5], &mut sink, &NoHost).unwrap();
        assert!(sink.is_empty());
        assert_eq!(kept.iter().map(|tensor| read(&**tensor)).collect::<Vec<_>>(), want);

        let given: Vec<_> = kept.iter().map(|tensor| Input::Device(&**tensor)).collect();
        let results = brought(&mut *other, &given, 3);
        for (i, (found, expected)) in results.iter().zip(run(&mut *other, &want).unwrap()).enumerate() {
            compare(&format!("{device} {precision}, output {i}"), found, &expected, 0.0);
        }
        // Mix inputs from the host and the device. Further runs and the end of the producing session must not change them.
        let mixed = given.iter().zip(&want).enumerate();
        let mixed: Vec<_> =
            mixed.map(|(i, (there, here))| if i % 2 == 0 { *there } else { view(here) }).collect();
        assert_eq!(brought(&mut *other, &mixed, 3), results);
        run(&mut *one, &[noise(&[1, 4, 6, 5], 77)]).unwrap();
        drop(one);
        assert_eq!(brought(&mut *other, &given, 3), results);
        drop(other);
        assert_eq!(read(&*kept.remove(1)), want[1]);
    }
}

#[test]
fn outputs_stay_and_are_inputs() {
    stay_and_return(&provider(), "cpu");
}

/// A tensor of the CPU cannot be an input on another device.
pub(super) fn refused_from_the_cpu(provider: &GgmlProvider, device: &str) {
    let (front, back) = (front(), back());
    let session = |model: &Model, device: &str| {
        let spec = BuildSpec { device: device.into(), ..spec(Precision::Fp32) };
        provider.build(&model.onnx(), &spec, model, &NoHost).unwrap().session(model, &NoHost).unwrap()
    };
    let mut sink = VecSink::default();
    let x = view(&front.feeds[0]);
    let kept = session(&front, "cpu").run_on_device(&[x], &[true; 5], &mut sink, &NoHost).unwrap();
    let given: Vec<_> = kept.iter().map(|tensor| Input::Device(&**tensor)).collect();
    let error = session(&back, device).run_on_device(&given, &[false; 3], &mut sink, &NoHost).unwrap_err();
    assert_eq!(error.code, ErrorCode::InvalidArgument);
    assert!(error.message.contains("another device") && error.hint.is_some(), "{error}");
}
