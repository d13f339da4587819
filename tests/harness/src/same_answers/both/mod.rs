//! One question, asked of a policy's component twice, in an instance of its own each time, and of the
//! same policy's crate natively. Tests have this module, too.

mod native;
mod questions;
pub mod words;

use std::collections::BTreeMap;
use std::fmt::Write;

use berth_kernel::node::ports::{Input, PolicyRuntime};
use berth_kernel::policy::hooks::Hook;
use berth_kernel::policy::version::PolicyVersion;
use berth_policy_sdk::testing::Random;
use berth_policy_sdk::{Context, Hooks};
use native::{NATIVE, Native};
use questions::{Question, Scene};
use words::Words;

/// The contract in whose terms the questions are recorded.
const WORLD: &str = "berth:policy@0.1.0";
/// The hooks of the contract, as the daemon's type and as a policy's.
const HOOKS: [(Hook, Hooks); 4] = [
    (Hook::Offer, Hooks::OFFER),
    (Hook::Place, Hooks::PLACE),
    (Hook::Admit, Hooks::ADMIT),
    (Hook::Triage, Hooks::TRIAGE),
];

/// A node as the daemon writes it down.
#[derive(serde::Serialize)]
struct Written<'a> {
    world: &'a str,
    node: &'a berth_policy_sdk::Node,
    shares: &'a [Option<u32>],
}

/// The policies in both forms.
pub struct Both<'a, P> {
    policies: &'a P,
    pairs: Vec<(&'static Native, &'a PolicyVersion)>,
}

/// How often a hook of a policy was called, and how often it did not pass.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Count {
    asked: u64,
    answered: u64,
}

/// What came of it.
#[derive(Debug, Default)]
pub struct Tally {
    counts: BTreeMap<(&'static str, &'static str), Count>,
    /// As text, each with its node's number.
    pub differences: Vec<String>,
}

impl<'a, P: PolicyRuntime> Both<'a, P> {
    /// # Errors
    /// If what ships is not what is compiled in here, or says that it has other hooks.
    pub fn new(policies: &'a P, versions: &'a [PolicyVersion]) -> Result<Self, String> {
        if versions.len() != NATIVE.len() {
            return Err(format!("{} policies ship, {} are known here", versions.len(), NATIVE.len()));
        }
        let pair = |native: &'static Native| {
            let version = versions.iter().find(|version| version.name == native.name);
            let version = version.ok_or_else(|| format!("no {} ships", native.name))?;
            let of_sources = (native.hooks)();
            let same = |&(hook, bit)| version.hooks.contains(&hook) == (of_sources & bit == bit);
            if HOOKS.iter().all(same) {
                Ok((native, version))
            } else {
                Err(format!("{} ships with other hooks than its sources have: `just policies`", native.name))
            }
        };
        Ok(Self { policies, pairs: NATIVE.iter().map(pair).collect::<Result<_, _>>()? })
    }

    /// Every hook of every policy, about the nodes of these numbers.
    pub fn ask_about(&self, nodes: impl Iterator<Item = u64>) -> Tally {
        let mut tally = Tally::default();
        for number in nodes {
            let mut random = Random(number);
            let scene = Scene::draw(&mut random);
            let words = Words::of(&scene.node);
            let written = Written { world: WORLD, node: &scene.node, shares: &words.shares() };
            let node = serde_json::to_vec(&written).expect("a node is plain data");
            let mut input = Input { node, question: Vec::new() };
            for (native, version) in &self.pairs {
                let parameters = (native.parameters)(&mut random);
                let context = Context { node: scene.node.clone(), parameters };
                for hook in &version.hooks {
                    let question = scene.question(*hook, &mut random);
                    input.question = serde_json::to_vec(&question).expect("a question is plain data");
                    let said = self.ask(native, version, &context, &question, &words, &input);
                    let count = tally.counts.entry((native.name, hook.as_str())).or_default();
                    count.asked += 1;
                    match said {
                        Ok(answered) => count.answered += u64::from(answered),
                        Err(words) => tally.differences.push(format!("node {number}: {words}")),
                    }
                }
            }
        }
        tally
    }

    /// Whether the policy has an answer.
    fn ask(
        &self,
        native: &Native,
        version: &PolicyVersion,
        context: &Context,
        question: &Question,
        words: &Words,
        input: &Input,
    ) -> Result<bool, String> {
        let natively = (native.ask)(context, question, words);
        let mut fuel = None;
        for instance in 1..=2 {
            let asked = self.policies.call_recorded(&version.digest, &context.parameters, input)?;
            let same =
                asked.answer.as_ref() == Ok(&natively) && fuel.is_none_or(|fuel| fuel == asked.cost.fuel);
            if !same {
                return Err(format!(
                    "{} {} {question:?}\nnatively: {natively:?}\ninstance {instance}: {:?}, fuel {}, before {fuel:?}",
                    native.name, context.parameters, asked.answer, asked.cost.fuel
                ));
            }
            fuel = Some(asked.cost.fuel);
        }
        Ok(natively.is_some())
    }
}

impl Tally {
    /// Takes what another thread found.
    pub fn add(&mut self, other: Self) {
        for (of, count) in other.counts {
            let sum = self.counts.entry(of).or_default();
            sum.asked += count.asked;
            sum.answered += count.answered;
        }
        self.differences.extend(other.differences);
    }

    /// The number of policies that were called.
    pub fn policies(&self) -> usize {
        let mut names: Vec<_> = self.counts.keys().map(|(policy, _)| policy).collect();
        names.dedup();
        names.len()
    }

    /// A hook that passed in every call: two that always pass prove nothing.
    pub fn silent(&self) -> Option<String> {
        let silent = self.counts.iter().find(|(_, count)| count.answered == 0);
        silent.map(|((policy, hook), count)| format!("{policy} {hook} passed {} times", count.asked))
    }

    /// A line for each hook of each policy.
    pub fn table(&self) -> String {
        self.counts.iter().fold(String::new(), |mut table, ((policy, hook), count)| {
            // Writing into a text cannot fail.
            let _ = writeln!(
                table,
                "{policy:10} {hook:6} asked {:6}, answered {:6}",
                count.asked, count.answered
            );
            table
        })
    }
}
