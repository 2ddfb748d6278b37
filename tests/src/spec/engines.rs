//! `build`, `engine_serialize`, `engine_load`, `engine_check`.

use super::{
    Subject, Verdict,
    fixture::{INPUTS, OUTPUTS, WEIGHTS, unknown_operator, unknown_operators},
    require,
    subject::Ready,
};
use sdrun_abi::{
    BuildSpec, Compatibility, DType, Engine, EngineInfo, ErrorCode, NoHost, Precision, Provider, TensorSpec,
};

pub(super) fn an_unknown_operator_is_named(subject: &Subject) -> Verdict {
    let ready = subject.ready()?;
    let built = ready.plugin.build(&unknown_operator(), &ready.spec(), &ready.fixture.weights(0), &NoHost);
    let Err(error) = built else {
        return Err("it builds a model with an operator that does not exist".into());
    };
    require!(
        error.code == ErrorCode::Unimplemented,
        "the code is {:?}, not Unimplemented: {error}",
        error.code
    );
    require!(error.message.contains("NoSuchOperator"), "the message does not name the operator: {error}");
    Ok(())
}

pub(super) fn an_assessment_lists_every_node(subject: &Subject) -> Verdict {
    let ready = subject.ready()?;
    let assess = |model: &[u8]| ready.plugin.assess(model, &ready.spec()).map_err(|e| format!("assess: {e}"));
    let good = assess(&ready.fixture.bytes)?;
    if let Some(nodes) = &good.unsupported {
        require!(nodes.is_empty(), "it builds this graph, but reports that it cannot run {nodes:?}");
        let bad = assess(&unknown_operators())?
            .unsupported
            .ok_or("it reports what it can run, but not what it cannot")?;
        let ops: Vec<&str> = bad.iter().map(|node| node.op.as_str()).collect();
        require!(ops == ["NoSuchOperator", "NoOtherOperator"], "of two unknown operators it reports {bad:?}");
        require!(bad[0].name == "culprit" && !bad[0].reason.is_empty(), "it reports {:?}", bad[0]);
    }
    let memory = &good.memory;
    let figures =
        [memory.host_weights, memory.host_activations, memory.device_weights, memory.device_activations];
    require!(!figures.contains(&Some(0)), "an unknown figure is null: {memory:?}");
    Ok(())
}

pub(super) fn a_damaged_model_is_refused(subject: &Subject) -> Verdict {
    let ready = subject.ready()?;
    let whole = &ready.fixture.bytes;
    for damaged in [&b"garbage"[..], &[], &whole[..whole.len() / 2], &whole[..whole.len() - 1]] {
        let built = ready.plugin.build(damaged, &ready.spec(), &ready.fixture.weights(0), &NoHost);
        require!(built.is_err(), "it builds {} bytes out of a model of {}", damaged.len(), whole.len());
    }
    ready.fixture.check(ready.build()?.as_ref(), &ready.fixture.weights(0))
}

pub(super) fn a_precision_that_is_not_offered_is_refused(subject: &Subject) -> Verdict {
    let ready = subject.ready()?;
    for precision in Precision::ALL {
        if !ready.capabilities.precisions.contains(&precision) {
            let built = ready.build_with(&BuildSpec { precision, ..ready.spec() });
            require!(built.is_err(), "it builds in {precision}, which it does not offer");
        }
    }
    Ok(())
}

pub(super) fn every_precision_offered_computes(subject: &Subject) -> Verdict {
    let ready = subject.ready()?;
    for precision in &ready.capabilities.precisions {
        let engine = ready.build_with(&BuildSpec { precision: *precision, ..ready.spec() })?;
        let right = ready.fixture.check(engine.as_ref(), &ready.fixture.weights(0));
        right.map_err(|why| format!("in {precision}: {why}"))?;
    }
    Ok(())
}

pub(super) fn unknown_options_are_refused(subject: &Subject) -> Verdict {
    let ready = subject.ready()?;
    let mut spec = ready.spec();
    spec.options.insert("no-such-option".into(), "1".into());
    let Err(error) = ready.build_with(&spec) else { return Err("it accepts an unknown option".into()) };
    require!(error.contains("no-such-option"), "the message does not name the option: {error}");
    Ok(())
}

/// Checks rule 17 for an engine of the fixture.
fn describes_the_fixture(info: &EngineInfo, baked: bool) -> Verdict {
    let specs = |list: &[(&str, [usize; 2])]| -> Vec<TensorSpec> {
        let spec = |(name, shape): &(&str, [usize; 2])| TensorSpec {
            name: name.to_string(),
            dtype: DType::F32,
            shape: shape.iter().map(|d| Some(*d)).collect(),
        };
        list.iter().map(spec).collect()
    };
    require!(info.inputs == specs(&INPUTS), "its inputs are {:?}", info.inputs);
    require!(info.outputs == specs(&OUTPUTS), "its outputs are {:?}", info.outputs);
    let mut weights: Vec<(&str, &[usize])> = if baked { vec![] } else { WEIGHTS.to_vec() };
    weights.sort_unstable();
    let mut told: Vec<(&str, &[usize])> =
        info.weights.iter().map(|w| (w.name.as_str(), &w.shape[..])).collect();
    told.sort_unstable();
    require!(
        told == weights && info.weights.iter().all(|w| w.dtype == DType::F32),
        "its weights are {:?}",
        info.weights
    );
    require!(!info.compatibility.is_empty(), "its compatibility string is empty");
    Ok(())
}

pub(super) fn engine_information_is_that_of_the_graph(subject: &Subject) -> Verdict {
    describes_the_fixture(subject.ready()?.build()?.info(), false)
}

fn stored(engine: &dyn Engine) -> Result<Vec<u8>, String> {
    engine.serialize().map_err(|e| format!("serialize: {e}"))
}

fn load(ready: &Ready, payload: &[u8]) -> Result<Box<dyn Engine>, String> {
    ready.plugin.load(payload, &ready.spec(), &NoHost).map_err(|e| format!("load: {e}"))
}

pub(super) fn a_stored_engine_is_the_same_engine(subject: &Subject) -> Verdict {
    let ready = subject.ready()?;
    let built = ready.build()?;
    let verdict =
        ready.plugin.check(&built.info().compatibility, &ready.device.id).map_err(|e| e.to_string())?;
    require!(verdict == Compatibility::Optimal, "it judges an engine it has just built: {verdict:?}");
    let payload = stored(built.as_ref())?;
    let info = built.info().clone();
    drop(built);
    let loaded = load(&ready, &payload)?;
    require!(*loaded.info() == info, "built: {info:?}; loaded: {:?}", loaded.info());
    for set in [0, 1] {
        ready.fixture.check(loaded.as_ref(), &ready.fixture.weights(set))?;
    }
    ready.fixture.check(load(&ready, &stored(loaded.as_ref())?)?.as_ref(), &ready.fixture.weights(0))
}

pub(super) fn a_damaged_engine_is_refused(subject: &Subject) -> Verdict {
    let ready = subject.ready()?;
    let whole = stored(ready.build()?.as_ref())?;
    for damaged in
        [&[][..], b"garbage", &[0; 4096], &whole[..whole.len() / 2], &whole[..whole.len().min(16) / 2]]
    {
        require!(
            load(&ready, damaged).is_err(),
            "it loads {} bytes of an engine of {}",
            damaged.len(),
            whole.len()
        );
    }
    // A flipped bit may go undetected here, because the host compares a checksum first. It must not do harm.
    for position in (0..whole.len()).step_by((whole.len() / 50).max(1)) {
        let mut flipped = whole.clone();
        flipped[position] ^= 0x10;
        if let Ok(engine) = load(&ready, &flipped) {
            drop(engine.session(&ready.fixture.weights(0), &NoHost));
        }
    }
    ready.fixture.check(load(&ready, &whole)?.as_ref(), &ready.fixture.weights(0))
}

pub(super) fn a_foreign_compatibility_string_is_judged(subject: &Subject) -> Verdict {
    let ready = subject.ready()?;
    for foreign in ["", "another runtime 0.0.1", "{}", "\u{0}\u{ffff}"] {
        match ready.plugin.check(foreign, &ready.device.id) {
            Ok(Compatibility::Unsupported(why)) if !why.trim().is_empty() => {}
            Err(_) => {}
            Ok(other) => return Err(format!("it says {other:?} about {foreign:?}")),
        }
    }
    Ok(())
}

pub(super) fn baked_engines_need_no_weights(subject: &Subject) -> Verdict {
    let ready = subject.ready()?;
    let spec = BuildSpec { bake: true, ..ready.spec() };
    if !ready.capabilities.bake {
        require!(
            ready.build_with(&spec).is_err(),
            "it does not offer to bake weights, but does not refuse either"
        );
        return Ok(());
    }
    let engine = ready.build_with(&spec)?;
    describes_the_fixture(engine.info(), true)?;
    let later = ready
        .build()?
        .bake(&ready.fixture.weights(0), &NoHost)
        .map_err(|e| format!("bake, of an engine without weights: {e}"))?;
    describes_the_fixture(later.info(), true)?;
    let loaded =
        ready.plugin.load(&stored(engine.as_ref())?, &spec, &NoHost).map_err(|e| format!("load: {e}"))?;
    let nothing = ready.fixture.weights(0).without("w").without("b");
    for engine in [engine, loaded, later] {
        let mut session = engine.session(&nothing, &NoHost).map_err(|e| format!("session: {e}"))?;
        ready.fixture.check_session(session.as_mut(), &ready.fixture.weights(0))?;
    }
    Ok(())
}
