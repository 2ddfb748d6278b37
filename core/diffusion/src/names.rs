//! Names of samplers and schedules in other programs.

use crate::{sampler::Sampler, schedule::Schedule};

/// Names of samplers: ComfyUI's first, then those of A1111, diffusers and stable-diffusion.cpp that differ by more than case, spaces,
/// `-` and `_`.
const SAMPLERS: [(Sampler, &[&str]); 21] = [
    (
        Sampler::Euler,
        &["euler", "ddim", "EulerDiscreteScheduler", "FlowMatchEulerDiscreteScheduler", "DDIMScheduler"],
    ),
    (Sampler::EulerAncestral, &["euler_ancestral", "Euler a", "EulerAncestralDiscreteScheduler"]),
    (Sampler::Heun, &["heun", "HeunDiscreteScheduler"]),
    (Sampler::HeunPp2, &["heunpp2", "HeunPP2", "Heun++2"]),
    (Sampler::Dpm2, &["dpm_2", "DPM2", "KDPM2DiscreteScheduler"]),
    (Sampler::Dpm2Ancestral, &["dpm_2_ancestral", "DPM2 a", "KDPM2AncestralDiscreteScheduler"]),
    (Sampler::DpmPp2sAncestral, &["dpmpp_2s_ancestral", "DPM++ 2S a", "dpm++2s_a"]),
    (Sampler::DpmPpSde, &["dpmpp_sde", "dpmpp_sde_gpu", "DPM++ SDE", "DPMSolverSDEScheduler"]),
    (Sampler::DpmPp2m, &["dpmpp_2m", "DPM++ 2M", "dpm++2m", "DPMSolverMultistepScheduler"]),
    (Sampler::DpmPp2mSde, &["dpmpp_2m_sde", "dpmpp_2m_sde_gpu", "DPM++ 2M SDE"]),
    (Sampler::DpmPp2mSdeHeun, &["dpmpp_2m_sde_heun", "dpmpp_2m_sde_heun_gpu", "DPM++ 2M SDE Heun"]),
    (Sampler::DpmPp3mSde, &["dpmpp_3m_sde", "dpmpp_3m_sde_gpu", "DPM++ 3M SDE"]),
    (Sampler::Lms, &["lms", "LMSDiscreteScheduler"]),
    (Sampler::Ipndm, &["ipndm", "IPNDMScheduler"]),
    (Sampler::IpndmV, &["ipndm_v"]),
    (Sampler::Lcm, &["lcm", "LCMScheduler"]),
    (Sampler::ResMultistep, &["res_multistep"]),
    (Sampler::ResMultistepAncestral, &["res_multistep_ancestral"]),
    (Sampler::GradientEstimation, &["gradient_estimation"]),
    (Sampler::ErSde, &["er_sde"]),
    (Sampler::Seeds2, &["seeds_2"]),
];

/// Names of schedules: ComfyUI's first.
const SCHEDULES: [(Schedule, &[&str]); 11] = [
    (Schedule::Normal, &["normal", "Uniform", "discrete"]),
    (Schedule::SgmUniform, &["sgm_uniform"]),
    (Schedule::Simple, &["simple"]),
    (Schedule::DdimUniform, &["ddim_uniform", "DDIM"]),
    (Schedule::Karras, &["karras"]),
    (Schedule::Exponential, &["exponential"]),
    (Schedule::Beta, &["beta"]),
    (Schedule::KlOptimal, &["kl_optimal"]),
    (Schedule::AlignYourSteps, &["ays", "Align Your Steps", "align_your_steps"]),
    (Schedule::AlignYourStepsXl, &["ays_sdxl"]),
    (Schedule::LinearQuadratic, &["linear_quadratic"]),
];

/// Normalises a name.
fn key(name: &str) -> String {
    let name = name.to_lowercase().replace("++", "pp");
    name.chars().filter(|c| c.is_alphanumeric()).collect()
}

fn find<T: Copy>(table: &[(T, &[&str])], name: &str) -> Option<T> {
    let key_of_name = key(name);
    table.iter().find(|(_, names)| names.iter().any(|n| key(n) == key_of_name)).map(|(value, _)| *value)
}

/// Finds a schedule by a name in any spelling.
pub fn schedule(name: &str) -> Option<Schedule> {
    find(&SCHEDULES, name)
}

/// Finds a sampler by a name in any spelling. A1111's old names also name a schedule ("DPM++ 2M Karras").
pub fn sampler(name: &str) -> Option<(Sampler, Option<Schedule>)> {
    if let Some(sampler) = find(&SAMPLERS, name) {
        return Some((sampler, None));
    }
    let (sampler, last) = name.trim_end().rsplit_once([' ', '_'])?;
    Some((find(&SAMPLERS, sampler)?, Some(schedule(last)?)))
}

/// ComfyUI's names of all samplers.
pub fn samplers() -> impl Iterator<Item = &'static str> {
    SAMPLERS.iter().map(|(_, names)| names[0])
}

/// ComfyUI's names of all schedules.
pub fn schedules() -> impl Iterator<Item = &'static str> {
    SCHEDULES.iter().map(|(_, names)| names[0])
}

impl Sampler {
    /// ComfyUI's name.
    pub fn name(self) -> &'static str {
        SAMPLERS.iter().find(|(sampler, _)| *sampler == self).map_or("", |(_, names)| names[0])
    }

    /// A1111's default schedule for this sampler.
    pub fn usual_schedule(self) -> Schedule {
        match self {
            Self::DpmPp2m | Self::DpmPpSde | Self::DpmPp2sAncestral | Self::Dpm2 | Self::Dpm2Ancestral => {
                Schedule::Karras
            }
            Self::DpmPp2mSde | Self::DpmPp2mSdeHeun | Self::DpmPp3mSde => Schedule::Exponential,
            _ => Schedule::Normal,
        }
    }
}

impl Schedule {
    /// ComfyUI's name.
    pub fn name(self) -> &'static str {
        SCHEDULES.iter().find(|(schedule, _)| *schedule == self).map_or("", |(_, names)| names[0])
    }
}

#[cfg(test)]
mod tests {
    use super::{SAMPLERS, SCHEDULES, sampler, schedule};
    use crate::{sampler::Sampler, schedule::Schedule};

    #[test]
    fn every_name_leads_to_its_own_sampler() {
        assert!(Sampler::ALL.into_iter().all(|s| sampler(s.name()) == Some((s, None))));
        for (owner, names) in SAMPLERS {
            assert!(names.iter().all(|name| sampler(name) == Some((owner, None))), "{owner:?}");
        }
        assert!(SCHEDULES.iter().all(|(s, names)| names.iter().all(|name| schedule(name) == Some(*s))));
    }

    #[test]
    fn spellings_of_other_programs() {
        for (name, expected) in [
            ("DPM++ 2M Karras", (Sampler::DpmPp2m, Some(Schedule::Karras))),
            ("DPM++ 2M SDE Exponential", (Sampler::DpmPp2mSde, Some(Schedule::Exponential))),
            ("dpmpp_2m_karras", (Sampler::DpmPp2m, Some(Schedule::Karras))),
            ("Euler a", (Sampler::EulerAncestral, None)),
            ("euler_a", (Sampler::EulerAncestral, None)),
            ("dpm++2s_a", (Sampler::DpmPp2sAncestral, None)),
            ("dpm++2m", (Sampler::DpmPp2m, None)),
            ("DPMSolverMultistepScheduler", (Sampler::DpmPp2m, None)),
        ] {
            assert_eq!(sampler(name), Some(expected), "{name}");
        }
        assert_eq!(sampler("unipc3000"), None);
        assert_eq!(sampler(""), None);
        assert_eq!(schedule("SGM Uniform"), Some(Schedule::SgmUniform));
    }
}
