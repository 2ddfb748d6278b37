//! Names of samplers and schedules in other programs.

use crate::{sampler::Sampler, schedule::Schedule};

/// Names of samplers: ComfyUI's first where it has one, then those of A1111, diffusers and stable-diffusion.cpp that differ by more
/// than case, spaces, `-` and `_`.
const SAMPLERS: &[(Sampler, &[&str])] = &[
    (
        Sampler::Euler,
        &["euler", "EulerDiscreteScheduler", "FlowMatchEulerDiscreteScheduler", "EDMEulerScheduler"],
    ),
    (
        Sampler::EulerAncestral,
        &["euler_ancestral", "Euler a", "EulerAncestralDiscreteScheduler", "ddpm", "DDPMScheduler"],
    ),
    (Sampler::EulerCfgPp, &["euler_cfg_pp", "Euler CFG++"]),
    (Sampler::EulerAncestralCfgPp, &["euler_ancestral_cfg_pp", "euler_a_cfg_pp", "Euler a CFG++"]),
    (Sampler::Ddim, &["ddim", "DDIMScheduler", "ddim_trailing"]),
    (Sampler::DdimCfgPp, &["ddim_cfg_pp", "DDIM CFG++"]),
    (Sampler::Heun, &["heun", "HeunDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"]),
    (Sampler::HeunPp2, &["heunpp2", "HeunPP2", "Heun++2"]),
    (Sampler::Restart, &["restart"]),
    (Sampler::Dpm2, &["dpm_2", "DPM2", "KDPM2DiscreteScheduler"]),
    (Sampler::Dpm2Ancestral, &["dpm_2_ancestral", "DPM2 a", "KDPM2AncestralDiscreteScheduler"]),
    (Sampler::DpmFast, &["dpm_fast"]),
    (Sampler::DpmAdaptive, &["dpm_adaptive"]),
    (Sampler::DpmPp2s, &["dpmpp_2s", "DPMSolverSinglestepScheduler"]),
    (Sampler::DpmPp2sAncestral, &["dpmpp_2s_ancestral", "DPM++ 2S a", "dpm++2s_a"]),
    (Sampler::DpmPp2sAncestralCfgPp, &["dpmpp_2s_ancestral_cfg_pp"]),
    (Sampler::DpmPpSde, &["dpmpp_sde", "dpmpp_sde_gpu", "DPM++ SDE", "DPMSolverSDEScheduler"]),
    (
        Sampler::DpmPp2m,
        &["dpmpp_2m", "DPM++ 2M", "dpm++2m", "DPMSolverMultistepScheduler", "EDMDPMSolverMultistepScheduler"],
    ),
    (Sampler::DpmPp2mCfgPp, &["dpmpp_2m_cfg_pp"]),
    (
        Sampler::DpmPp2mSde,
        &[
            "dpmpp_2m_sde",
            "dpmpp_2m_sde_gpu",
            "DPM++ 2M SDE",
            "dpm++2m_sde_bt",
            "CosineDPMSolverMultistepScheduler",
        ],
    ),
    (Sampler::DpmPp2mSdeHeun, &["dpmpp_2m_sde_heun", "dpmpp_2m_sde_heun_gpu", "DPM++ 2M SDE Heun"]),
    (Sampler::DpmPp3m, &["dpmpp_3m", "DPM++ 3M"]),
    (Sampler::DpmPp3mSde, &["dpmpp_3m_sde", "dpmpp_3m_sde_gpu", "DPM++ 3M SDE"]),
    (Sampler::Lms, &["lms", "LMSDiscreteScheduler"]),
    (Sampler::Ipndm, &["ipndm", "IPNDMScheduler"]),
    (Sampler::IpndmV, &["ipndm_v"]),
    (Sampler::Plms, &["plms", "pndm", "PNDMScheduler"]),
    (Sampler::Deis, &["deis", "DEISMultistepScheduler"]),
    (Sampler::UniPc, &["uni_pc"]),
    (Sampler::UniPcBh2, &["uni_pc_bh2", "UniPCMultistepScheduler"]),
    (Sampler::SaSolver, &["sa_solver", "SASolverScheduler"]),
    (Sampler::SaSolverPece, &["sa_solver_pece"]),
    (Sampler::Lcm, &["lcm", "LCMScheduler", "FlowMatchLCMScheduler", "scm", "SCMScheduler"]),
    (Sampler::Tcd, &["tcd", "TCDScheduler"]),
    (Sampler::ResMultistep, &["res_multistep"]),
    (Sampler::ResMultistepCfgPp, &["res_multistep_cfg_pp"]),
    (Sampler::ResMultistepAncestral, &["res_multistep_ancestral"]),
    (Sampler::ResMultistepAncestralCfgPp, &["res_multistep_ancestral_cfg_pp"]),
    (Sampler::GradientEstimation, &["gradient_estimation", "euler_ge"]),
    (Sampler::GradientEstimationCfgPp, &["gradient_estimation_cfg_pp"]),
    (Sampler::ErSde, &["er_sde"]),
    (Sampler::ExpHeun2, &["exp_heun_2_x0"]),
    (Sampler::ExpHeun2Sde, &["exp_heun_2_x0_sde"]),
    (Sampler::Seeds2, &["seeds_2"]),
    (Sampler::Seeds3, &["seeds_3"]),
];

/// Names of schedules: ComfyUI's first where it has one. Most of ComfyUI's are names of nodes after `linear_quadratic`.
const SCHEDULES: &[(Schedule, &[&str])] = &[
    (Schedule::Normal, &["normal", "Uniform", "discrete"]),
    (Schedule::SgmUniform, &["sgm_uniform"]),
    (Schedule::Simple, &["simple"]),
    (Schedule::DdimUniform, &["ddim_uniform", "DDIM"]),
    (Schedule::Karras, &["karras"]),
    // A1111's usual ρ of 1 makes "Polyexponential" the same.
    (Schedule::Exponential, &["exponential", "polyexponential"]),
    (Schedule::Beta, &["beta"]),
    (Schedule::KlOptimal, &["kl_optimal"]),
    (Schedule::AlignYourSteps, &["ays", "Align Your Steps"]),
    (Schedule::AlignYourStepsXl, &["ays_sdxl"]),
    (Schedule::AlignYourStepsVideo, &["ays_svd"]),
    (Schedule::LinearQuadratic, &["linear_quadratic"]),
    (Schedule::Laplace, &["laplace", "LaplaceScheduler"]),
    (Schedule::Smoothstep, &["smoothstep"]),
    (Schedule::BongTangent, &["bong_tangent"]),
    (Schedule::LogitNormal, &["logit_normal"]),
    (Schedule::Turbo, &["turbo", "SDTurboScheduler"]),
    (Schedule::Lcm, &["lcm"]),
    (Schedule::Scm, &["scm"]),
    (Schedule::OptimalStepsFlux, &["optimal_steps_flux", "OptimalStepsScheduler"]),
    (Schedule::OptimalStepsWan, &["optimal_steps_wan"]),
    (Schedule::OptimalStepsChroma, &["optimal_steps_chroma"]),
    (Schedule::Flux, &["flux"]),
    (Schedule::Flux2, &["flux2", "Flux2Scheduler"]),
    (Schedule::Sana, &["sana", "flow_sigmas"]),
    (Schedule::Linspace, &["linspace"]),
    (Schedule::Leading, &["leading"]),
    (Schedule::Trailing, &["trailing"]),
];

/// Normalises a name.
fn key(name: &str) -> String {
    let name = name.to_lowercase().replace("++", "pp");
    name.chars().filter(|c| c.is_alphanumeric()).collect()
}

pub(crate) fn find<T: Copy>(table: &[(T, &[&str])], name: &str) -> Option<T> {
    let key_of_name = key(name);
    table.iter().find(|(_, names)| names.iter().any(|n| key(n) == key_of_name)).map(|(value, _)| *value)
}

/// Finds a schedule by a name in any spelling.
pub fn schedule(name: &str) -> Option<Schedule> {
    find(SCHEDULES, name)
}

/// Finds a sampler by a name in any spelling. A1111's old names also name a schedule ("DPM++ 2M Karras").
pub fn sampler(name: &str) -> Option<(Sampler, Option<Schedule>)> {
    if let Some(sampler) = find(SAMPLERS, name) {
        return Some((sampler, None));
    }
    let (sampler, last) = name.trim_end().rsplit_once([' ', '_'])?;
    Some((find(SAMPLERS, sampler)?, Some(schedule(last)?)))
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

    /// A1111's name, as metadata holds it, or ComfyUI's if A1111 does not have it.
    pub fn label(self) -> &'static str {
        match self {
            Self::Euler => "Euler",
            Self::EulerAncestral => "Euler a",
            Self::Ddim => "DDIM",
            Self::DdimCfgPp => "DDIM CFG++",
            Self::Heun => "Heun",
            Self::Restart => "Restart",
            Self::Dpm2 => "DPM2",
            Self::Dpm2Ancestral => "DPM2 a",
            Self::DpmFast => "DPM fast",
            Self::DpmAdaptive => "DPM adaptive",
            Self::DpmPp2sAncestral => "DPM++ 2S a",
            Self::DpmPpSde => "DPM++ SDE",
            Self::DpmPp2m => "DPM++ 2M",
            Self::DpmPp2mSde => "DPM++ 2M SDE",
            Self::DpmPp2mSdeHeun => "DPM++ 2M SDE Heun",
            Self::DpmPp3mSde => "DPM++ 3M SDE",
            Self::Lms => "LMS",
            Self::Plms => "PLMS",
            Self::UniPc => "UniPC",
            Self::Lcm => "LCM",
            _ => self.name(),
        }
    }

    /// A1111's default schedule for this sampler.
    pub fn usual_schedule(self) -> Schedule {
        match self {
            Self::DpmPp2m
            | Self::DpmPpSde
            | Self::DpmPp2sAncestral
            | Self::Dpm2
            | Self::Dpm2Ancestral
            | Self::Restart => Schedule::Karras,
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

    /// A1111's name, as metadata holds it, or ComfyUI's if A1111 does not have it.
    pub fn label(self) -> &'static str {
        match self {
            Self::Normal => "Normal",
            Self::SgmUniform => "SGM Uniform",
            Self::Simple => "Simple",
            Self::DdimUniform => "DDIM",
            Self::Karras => "Karras",
            Self::Exponential => "Exponential",
            Self::Beta => "Beta",
            Self::KlOptimal => "KL Optimal",
            Self::AlignYourSteps => "Align Your Steps",
            Self::Turbo => "Turbo",
            _ => self.name(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{SAMPLERS, SCHEDULES, sampler, schedule};
    use crate::{sampler::Sampler, schedule::Schedule};

    #[test]
    fn labels_are_names() {
        assert!(Sampler::ALL.iter().all(|&s| sampler(s.label()) == Some((s, None))));
        assert!(Schedule::ALL.iter().all(|&s| schedule(s.label()) == Some(s)));
    }

    #[test]
    fn every_name_leads_to_its_own_sampler() {
        assert!(Sampler::ALL.iter().all(|&s| sampler(s.name()) == Some((s, None))));
        assert!(Schedule::ALL.iter().all(|&s| schedule(s.name()) == Some(s)));
        for (owner, names) in SAMPLERS {
            assert!(names.iter().all(|name| sampler(name) == Some((*owner, None))), "{owner:?}");
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
            ("UniPC", (Sampler::UniPc, None)),
            ("DPM adaptive", (Sampler::DpmAdaptive, None)),
            ("DDIM CFG++", (Sampler::DdimCfgPp, None)),
            ("Restart Karras", (Sampler::Restart, Some(Schedule::Karras))),
            ("euler_a_cfg_pp", (Sampler::EulerAncestralCfgPp, None)),
        ] {
            assert_eq!(sampler(name), Some(expected), "{name}");
        }
        assert_eq!(sampler("unipc3000"), None);
        assert_eq!(sampler(""), None);
        assert_eq!(schedule("SGM Uniform"), Some(Schedule::SgmUniform));
    }
}
