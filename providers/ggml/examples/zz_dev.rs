//! Temporary driver.
use sdrun_abi::*;
use sdrun_graph::{ExternalBase, Graph, OpenDims, OpenOptions, WeightData, simplify};
use std::{collections::BTreeMap, io::{Read, Seek}, path::{Path, PathBuf}, time::Instant};

struct Log;
impl Host for Log {
    fn log(&self, l: LogLevel, t: &str, m: &str) { eprintln!("[{l:?} {t}] {m}"); }
    fn progress(&self, _: &str, _: u64, _: u64) -> Flow { Flow::Continue }
    fn cancelled(&self) -> bool { false }
}
struct Src(Graph);
impl WeightSource for Src {
    fn get(&self, name: &str) -> Result<Weight<'_>> {
        let (_, w) = self.0.weights().find(|(n, _)| *n == name).ok_or_else(|| Error::not_found(name))?;
        match &w.data {
            WeightData::Inline(b) => Weight::new(w.dtype, w.shape.clone(), b.to_vec()),
            WeightData::External { file, offset } => {
                let mut f = std::fs::File::open(&**file).unwrap();
                f.seek(std::io::SeekFrom::Start(*offset)).unwrap();
                let mut v = vec![0; w.dtype.bytes_of(&w.shape).unwrap()];
                f.read_exact(&mut v).unwrap();
                Weight::new(w.dtype, w.shape.clone(), v)
            }
            other => panic!("{other:?}"),
        }
    }
}
fn rss() -> String {
    let s = std::fs::read_to_string("/proc/self/status").unwrap();
    s.lines().filter(|l| l.starts_with("VmHWM") || l.starts_with("VmRSS")).map(|l| l.split_whitespace().collect::<Vec<_>>().join(" ")).collect::<Vec<_>>().join(" ")
}
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let dir = Path::new(&a[1]);
    let spec: serde_json::Value = serde_json::from_slice(&std::fs::read(dir.join("spec.json")).unwrap()).unwrap();
    let precision: Precision = a.get(2).map_or("fp32", |s| s).parse().unwrap();
    let runs: usize = a.get(3).map_or(1, |s| s.parse().unwrap());
    let p = sdrun_provider_ggml::GgmlProvider::default();
    let info = p.init(&InitConfig { plugin_dir: dir.into(), ..Default::default() }, &Log).unwrap();
    eprintln!("{info:?} {:?}", p.devices().unwrap());
    let t = Instant::now();
    let mut g = Graph::open(dir.join(spec["model"].as_str().unwrap()), &OpenOptions { allow_links: true, ..Default::default() }).unwrap();
    let shapes: BTreeMap<String, Vec<usize>> = serde_json::from_value(spec["shapes"].clone()).unwrap();
    let rep = simplify(&mut g, &shapes, OpenDims::Refuse).unwrap();
    eprintln!("open+simplify {:?} nodes {} -> {}", t.elapsed(), rep.nodes_before, rep.nodes_after);
    let model = g.to_onnx_stripped().unwrap();
    let src = Src(g);
    let t = Instant::now();
    let bs = BuildSpec { device: "cpu".into(), precision, threads: a.get(4).map(|s| s.parse().unwrap()), bake: false, options: Default::default() };
    let e = match p.build(&model, &bs, &src, &Log) { Ok(e) => e, Err(e) => { eprintln!("BUILD ERROR {e:?}"); std::process::exit(1) } };
    eprintln!("build {:?} {} bytes", t.elapsed(), model.len());
    let t = Instant::now();
    let mut s = e.session(&src, &Log).unwrap();
    eprintln!("session {:?} {:?}", t.elapsed(), s.memory().unwrap());
    let mut inputs = vec![];
    for i in &e.info().inputs {
        let f: PathBuf = dir.join(format!("{}.bin", i.name.replace(['/', ':'], "_")));
        let shape: Vec<usize> = i.shape.iter().map(|d| d.unwrap()).collect();
        inputs.push((i.dtype, shape, AlignedBuffer::copy_of(&std::fs::read(f).unwrap())));
    }
    let views: Vec<TensorView> = inputs.iter().map(|(d, s, b)| TensorView { dtype: *d, shape: s, data: b }).collect();
    let mut sink = VecSink::default();
    let mut first: Option<Vec<Vec<u8>>> = None;
    for r in 0..runs {
        let t = Instant::now();
        s.run(&views, &mut sink, &Log).unwrap();
        eprintln!("run {r} {:?} {}", t.elapsed(), rss());
        let outs: Vec<Vec<u8>> = (0..sink.len()).map(|i| sink.get(i).unwrap().data.to_vec()).collect();
        if let Some(f) = &first { assert!(*f == outs, "runs differ"); } else { first = Some(outs); }
    }
    for (i, o) in e.info().outputs.iter().enumerate() {
        std::fs::write(dir.join(format!("out_{}.bin", o.name.replace(['/', ':'], "_"))), sink.get(i).unwrap().data).unwrap();
    }
    eprintln!("peak {}", rss());
    let _ = ExternalBase::Stripped;
}
