//! The list of samplers.

use super::{
    Denoiser, Noise, Options, Path, Run, adams, ancestral, dpm_solver, heun, multistep, sa_solver, seeds,
    stages, unipc,
};
use crate::{
    program::Program,
    schedule::{Levels, a1111},
};

crate::list! {
    /// A sampling method.
    Sampler {
    /// Euler's method.
    Euler,
    /// Ancestral form of Euler's method, with new noise in each step. DDPM is the same.
    EulerAncestral,
    /// Euler's method with CFG++ (Chung et al., 2024): the slope comes from the negative prompt.
    EulerCfgPp,
    /// Its ancestral form, with new noise in each step.
    EulerAncestralCfgPp,
    /// DDIM (Song et al., 2020). With η = 0 it is [`Euler`](Self::Euler), with η = 1 [`EulerAncestral`](Self::EulerAncestral).
    Ddim,
    /// A1111's DDIM CFG++: [`EulerCfgPp`](Self::EulerCfgPp) at a smaller scale of guidance.
    DdimCfgPp,
    /// Heun's method; two calls per step.
    Heun,
    /// Heun++; up to three calls per step.
    HeunPp2,
    /// Restart sampling (Xu et al., 2023): Heun's method that returns to a higher level once or twice, from 20 steps on. It
    /// replaces the path by Karras' levels.
    Restart,
    /// DPM-Solver-2; two calls per step.
    Dpm2,
    /// Its ancestral form, with new noise in each step.
    Dpm2Ancestral,
    /// DPM-Solver of orders 1 to 3 with as many calls as there are steps. It ends at the lowest level above 0.
    DpmFast,
    /// DPM-Solver of order 3 that chooses its own steps between the first level and the lowest above 0.
    DpmAdaptive,
    /// DPM-Solver++(2S) on the levels of the path: diffusers' "singlestep" solver of order 2.
    DpmPp2s,
    /// Ancestral form of DPM-Solver++(2S); two calls per step.
    DpmPp2sAncestral,
    /// The same with CFG++.
    DpmPp2sAncestralCfgPp,
    /// DPM-Solver++ SDE; two calls per step.
    DpmPpSde,
    /// DPM-Solver++(2M).
    DpmPp2m,
    /// The same with CFG++.
    DpmPp2mCfgPp,
    /// DPM-Solver++(2M) SDE, midpoint form.
    DpmPp2mSde,
    /// DPM-Solver++(2M) SDE, Heun form.
    DpmPp2mSdeHeun,
    /// DPM-Solver++(3M).
    DpmPp3m,
    /// DPM-Solver++(3M) SDE.
    DpmPp3mSde,
    /// Linear multistep of order 4.
    Lms,
    /// Adams-Bashforth of order 4, with coefficients for equal steps.
    Ipndm,
    /// Adams-Bashforth of order 4 for steps of different lengths.
    IpndmV,
    /// Pseudo linear multistep (Liu et al., 2022): [`Ipndm`](Self::Ipndm) with a first step of order 2.
    Plms,
    /// DEIS (Zhang and Chen, 2022): order 3 in ComfyUI, 2 in diffusers, which interpolates over another variable.
    Deis,
    /// UniPC (Zhao et al., 2023) with `B(h) = h`: order 3, in diffusers 2.
    UniPc,
    /// UniPC with `B(h) = e^h - 1`.
    UniPcBh2,
    /// Stochastic Adams (Xue et al., 2023) of orders 3 and 4, in diffusers 2 and 2. Noise between 20 and 80 % of the way.
    SaSolver,
    /// The same with a second call per step, for the corrected state.
    SaSolverPece,
    /// For consistency models: the clean state with new noise. With the schedule of that name this is SCM (Sana Sprint).
    Lcm,
    /// Trajectory consistency distillation (Zheng et al., 2024) with γ = 0.3.
    Tcd,
    /// Exponential multistep of order 2 (Zhang et al., 2023).
    ResMultistep,
    /// The same with CFG++.
    ResMultistepCfgPp,
    /// Its ancestral form, with new noise in each step.
    ResMultistepAncestral,
    /// The same with CFG++.
    ResMultistepAncestralCfgPp,
    /// Gradient estimation with γ = 2: Euler's method that extrapolates the slope.
    GradientEstimation,
    /// The same with CFG++.
    GradientEstimationCfgPp,
    /// Extended reverse-time SDE solver of order 3.
    ErSde,
    /// Exponential form of Heun's method; two calls per step.
    ExpHeun2,
    /// The same as an SDE.
    ExpHeun2Sde,
    /// SEEDS-2; two calls per step.
    Seeds2,
    /// SEEDS-3; three calls per step.
    Seeds3,
}
}

impl Sampler {
    /// Whether A1111 and ComfyUI give it Brownian noise.
    pub fn is_brownian(self) -> bool {
        matches!(self, Self::DpmPpSde | Self::DpmPp2mSde | Self::DpmPp2mSdeHeun | Self::DpmPp3mSde)
    }

    /// Whether it draws noise.
    pub fn is_stochastic(self, options: &Options) -> bool {
        self.eta(options) > 0.0
            || self.churns() && options.churn > 0.0
            || matches!(self, Self::Lcm | Self::ErSde | Self::Restart)
            // diffusers draws noise in each step, used or not.
            || matches!(self, Self::SaSolver | Self::SaSolverPece) && options.program == Program::Diffusers
    }

    /// Whether the program computes one extra level and drops the second lowest.
    pub fn drops_second_lowest(self, program: Program) -> bool {
        match program {
            Program::ComfyUi => {
                matches!(self, Self::Dpm2 | Self::Dpm2Ancestral | Self::UniPc | Self::UniPcBh2)
            }
            Program::A1111 => matches!(self, Self::Dpm2 | Self::Dpm2Ancestral | Self::DpmPp3mSde),
            Program::Diffusers => false,
        }
    }

    /// The levels that the program uses for this sampler in place of a schedule's. Only A1111 has such samplers.
    pub fn own_levels(self, program: Program, levels: &Levels, steps: usize) -> Option<Vec<f64>> {
        match (program, self) {
            (Program::A1111, Self::Ddim | Self::DdimCfgPp | Self::Plms) => {
                Some(a1111::training_steps(levels, steps))
            }
            (Program::A1111, Self::UniPc) => Some(a1111::uni_pc(levels, steps)),
            _ => None,
        }
    }

    /// The level that the program puts in place of the 0 at the end of a path.
    pub fn last_level(self, program: Program, levels: &Levels) -> f64 {
        match (program, self) {
            (Program::Diffusers, Self::Deis | Self::Tcd) => levels.min(),
            (Program::ComfyUi, Self::UniPc | Self::UniPcBh2) => 0.001,
            _ => 0.0,
        }
    }

    /// Whether diffusers chooses its levels as those of a multistep solver
    /// ([`solver_sigmas`](crate::schedule::diffusers::solver_sigmas)).
    pub fn is_solver(self) -> bool {
        use Sampler::*;
        matches!(
            self,
            DpmPp2s
                | DpmPp2m
                | DpmPp2mSde
                | DpmPp2mSdeHeun
                | DpmPp3m
                | DpmPp3mSde
                | Deis
                | UniPc
                | UniPcBh2
                | SaSolver
                | SaSolverPece
        )
    }

    /// The factor by which A1111 multiplies the scale of guidance for this sampler.
    pub fn guidance_factor(self) -> f64 {
        if self == Self::DdimCfgPp { 1.0 / 12.5 } else { 1.0 }
    }

    /// Whether it takes slopes from the negative prompt.
    fn is_cfg_pp(self) -> bool {
        matches!(
            self,
            Self::EulerCfgPp
                | Self::EulerAncestralCfgPp
                | Self::DdimCfgPp
                | Self::DpmPp2sAncestralCfgPp
                | Self::DpmPp2mCfgPp
                | Self::ResMultistepCfgPp
                | Self::ResMultistepAncestralCfgPp
                | Self::GradientEstimationCfgPp
        )
    }

    /// Whether it has the options of churn.
    fn churns(self) -> bool {
        matches!(self, Self::Euler | Self::Heun | Self::HeunPp2 | Self::Dpm2)
    }

    /// The share of new noise.
    fn eta(self, options: &Options) -> f64 {
        let usual = match self {
            Self::EulerAncestral
            | Self::EulerAncestralCfgPp
            | Self::Dpm2Ancestral
            | Self::DpmPp2sAncestral
            | Self::DpmPp2sAncestralCfgPp
            | Self::DpmPpSde
            | Self::DpmPp2mSde
            | Self::DpmPp2mSdeHeun
            | Self::DpmPp3mSde
            | Self::ResMultistepAncestral
            | Self::ResMultistepAncestralCfgPp
            | Self::ExpHeun2Sde
            | Self::Seeds2
            | Self::Seeds3
            | Self::SaSolver
            | Self::SaSolverPece => 1.0,
            Self::Tcd => 0.3,
            Self::Ddim | Self::DdimCfgPp | Self::DpmFast | Self::DpmAdaptive => 0.0,
            _ => return 0.0,
        };
        options.eta.unwrap_or(usual)
    }

    /// Denoises `x` along `path`. After each step, `observe` receives the step's index and the state. A path without steps changes nothing. The number of steps is that of
    /// the path, except for [`DpmFast`](Self::DpmFast), [`DpmAdaptive`](Self::DpmAdaptive) and [`Restart`](Self::Restart).
    pub fn run<D: Denoiser>(
        self,
        path: &Path<'_>,
        options: &Options,
        x: &mut Vec<f32>,
        denoiser: &mut D,
        noise: &mut dyn Noise,
        observe: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), D::Error> {
        if path.sigmas.len() < 2 {
            return Ok(());
        }
        let churn = if self.churns() { options.churn } else { 0.0 };
        let options = &Options { churn, ..*options };
        let (space, eta) = (path.levels.space(), self.eta(options));
        let run =
            &mut Run { path, options, space, eta, cfg_pp: self.is_cfg_pp(), x, denoiser, noise, observe };
        match self {
            Self::Euler | Self::EulerAncestral | Self::Ddim => ancestral::euler(run),
            Self::EulerCfgPp | Self::EulerAncestralCfgPp | Self::DdimCfgPp => ancestral::cfg_pp(run),
            Self::Dpm2 | Self::Dpm2Ancestral => ancestral::dpm2(run),
            Self::DpmPp2sAncestral | Self::DpmPp2sAncestralCfgPp => ancestral::dpm_pp_2s(run),
            Self::Lcm => ancestral::lcm(run),
            Self::Tcd => ancestral::tcd(run),
            Self::Heun => heun::heun(run),
            Self::HeunPp2 => heun::heun_pp2(run),
            Self::Restart => heun::restart(run),
            Self::DpmFast => dpm_solver::fast(run),
            Self::DpmAdaptive => dpm_solver::adaptive(run),
            Self::DpmPp2s => multistep::singlestep(run),
            Self::DpmPp2m | Self::DpmPp2mCfgPp => {
                let space = run.equation();
                multistep::dpm_pp_2m(run, space, multistep::Form::Midpoint)
            }
            Self::DpmPp2mSde => multistep::dpm_pp_2m(run, space, multistep::Form::Midpoint),
            Self::DpmPp2mSdeHeun => multistep::dpm_pp_2m(run, space, multistep::Form::Heun),
            Self::DpmPp3m => {
                let space = run.equation();
                multistep::dpm_pp_3m(run, space)
            }
            Self::DpmPp3mSde => multistep::dpm_pp_3m(run, space),
            Self::ResMultistep
            | Self::ResMultistepCfgPp
            | Self::ResMultistepAncestral
            | Self::ResMultistepAncestralCfgPp => multistep::res(run),
            Self::GradientEstimation | Self::GradientEstimationCfgPp => multistep::gradient_estimation(run),
            Self::DpmPpSde => stages::dpm_pp_sde(run),
            Self::ErSde => stages::er_sde(run),
            Self::Seeds2 => seeds::seeds_2(run),
            Self::Seeds3 => seeds::seeds_3(run),
            Self::ExpHeun2 | Self::ExpHeun2Sde => seeds::exp_heun_2(run),
            Self::Lms => adams::lms(run),
            Self::Ipndm => adams::ipndm(run),
            Self::IpndmV => adams::ipndm_v(run),
            Self::Plms => adams::plms(run),
            Self::Deis => adams::deis(run),
            Self::UniPc => unipc::unipc(run, unipc::Variant::Bh1),
            Self::UniPcBh2 => unipc::unipc(run, unipc::Variant::Bh2),
            Self::SaSolver => sa_solver::sa_solver(run, false),
            Self::SaSolverPece => sa_solver::sa_solver(run, true),
        }
    }
}
