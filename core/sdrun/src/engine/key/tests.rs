use super::*;
use std::collections::HashSet;

#[derive(Clone)]
struct Parts {
    id: String,
    build: String,
    runtime: RuntimeInfo,
    init: BTreeMap<String, String>,
    class: String,
    topology: String,
    spec: BuildSpec,
    baked: Option<String>,
}

fn parts() -> Parts {
    Parts {
        id: "p".into(),
        build: "b".into(),
        runtime: RuntimeInfo::new("r", "1.0", None),
        init: BTreeMap::new(),
        class: "cpu".into(),
        topology: "t".into(),
        spec: BuildSpec::new("cpu0", Precision::Fp32),
        baked: None,
    }
}

fn hash(change: impl FnOnce(&mut Parts)) -> String {
    let mut p = parts();
    change(&mut p);
    let provide: Provide = serde_json::from_value(serde_json::json!({
        "id": p.id, "summary": "", "vendor": "", "version": "1", "build_id": p.build,
        "library": { "path": "lib.so", "sha256": "", "target": "", "abi_major": 1 },
    }))
    .unwrap();
    let baked = p.baked.as_deref();
    Key::new(&provide, &p.runtime, &p.init, &p.class, &p.topology, &p.spec, baked).hash().unwrap()
}

fn option(key: &str, value: &str) -> (String, String) {
    (key.into(), value.into())
}

#[test]
fn keys_differ_if_the_engine_would_differ() {
    type Change = Box<dyn Fn(&mut Parts)>;
    let open = |input: &str, shapes: &[&[usize]]| -> Change {
        let entry = (input.to_string(), shapes.iter().map(|s| s.to_vec()).collect::<Vec<_>>());
        Box::new(move |p| p.spec.open_shapes = OpenShapes::from([entry.clone()]))
    };
    let changes: Vec<Change> = vec![
        Box::new(|_| ()),
        Box::new(|p| p.id = "q".into()),
        Box::new(|p| p.build = "c".into()),
        Box::new(|p| p.runtime.name = "s".into()),
        Box::new(|p| p.runtime.version = "1.1".into()),
        Box::new(|p| p.init = BTreeMap::from([option("a", "1")])),
        Box::new(|p| p.class = "gpu".into()),
        Box::new(|p| p.topology = "u".into()),
        Box::new(|p| p.spec.precision = Precision::Fp16),
        Box::new(|p| p.spec.precision = Precision::Bf16),
        Box::new(|p| p.baked = Some("w".into())),
        Box::new(|p| p.baked = Some("v".into())),
        Box::new(|p| p.spec.vram_budget = Some(6)),
        Box::new(|p| p.spec.vram_budget = Some(7)),
        Box::new(|p| p.spec.options = BTreeMap::from([option("a", "1")])),
        Box::new(|p| p.spec.options = BTreeMap::from([option("a", "2")])),
        Box::new(|p| p.spec.options = BTreeMap::from([option("a", "1"), option("b", "1")])),
        // Values that resemble other fields.
        Box::new(|p| p.spec.options = BTreeMap::from([option("a", "1,b=1")])),
        Box::new(|p| p.spec.options = BTreeMap::from([option("vram-budget", "6")])),
        Box::new(|p| p.spec.options = BTreeMap::from([option("x", "[[1, 2]]")])),
        Box::new(|p| (p.build, p.runtime.name) = ("".into(), "br".into())),
        open("x", &[&[1, 2]]),
        open("x", &[&[1], &[2]]),
        open("x", &[]),
        open("y", &[&[1, 2]]),
    ];
    let keys: HashSet<String> = changes.iter().map(|change| hash(change)).collect();
    assert_eq!(keys.len(), changes.len());
}

#[test]
fn keys_match_if_the_engine_would_be_the_same() {
    let same: [fn(&mut Parts); 3] = [
        |p| p.spec.threads = Some(3),
        // Another device of the class, and another copy of the runtime.
        |p| p.spec.device = "cpu1".into(),
        |p| p.runtime.library = Some("/opt/r.so".into()),
    ];
    for change in same {
        assert_eq!(hash(change), hash(|_| ()));
    }
}
