//! Consistent hashing on the routing key with a bound on each worker's load
//!
//! A key has a home worker, the first one clockwise from the key's position on
//! the hash ring. It stays there while the home worker's in-flight count is at
//! most
//!
//! ```text
//! max(mean * load_factor, mean + balance_abs_threshold),   mean = (total + 1) / workers
//! ```
//!
//! over the workers that may take the request (`+ 1` is the request itself).
//! Otherwise the key goes to its first ring successor within that bound. So the
//! requests that one key spills land together on few workers and find each
//! other's cache, where a spill to the least loaded worker scatters them.
//!
//! With a factor of at least 1 the least loaded worker is always within the
//! bound, so somebody always is; should the counts ever disagree, the request
//! stays at home.
//!
//! Requests without a key go to the least loaded worker, equals in turn.

use std::{
    collections::HashMap,
    sync::{
        atomic::{AtomicUsize, Ordering},
        Arc,
    },
};

use super::{LoadBalancingPolicy, SelectWorkerInfo};
use crate::{
    observability::metrics::Metrics,
    routers::common::header_utils::extract_routing_key_hint,
    worker::{HashRing, Worker},
};

/// Configuration for the bounded consistent hashing policy
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BoundedConsistentHashingConfig {
    /// Multiple of the mean load up to which a worker is eligible; finite, at
    /// least 1.0 (1.0 is the tightest bound). Default: 1.25
    pub load_factor: f64,

    /// Requests above the mean that never count as overload, whatever the
    /// factor says. Keeps affinity where loads are tiny. Default: 0
    pub balance_abs_threshold: usize,
}

impl Default for BoundedConsistentHashingConfig {
    fn default() -> Self {
        Self {
            load_factor: 1.25,
            balance_abs_threshold: 0,
        }
    }
}

/// Execution branch for metrics
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Branch {
    NoHealthyWorkers,
    Home,
    Spill,
    Fallback,
    Unlabelled,
}

impl Branch {
    #[inline]
    const fn as_str(self) -> &'static str {
        match self {
            Self::NoHealthyWorkers => "no_healthy_workers",
            Self::Home => "home",
            Self::Spill => "spill",
            Self::Fallback => "fallback",
            Self::Unlabelled => "unlabelled",
        }
    }
}

/// A worker that may take the request: its index in the caller's slice and its
/// in-flight count, read once so that one selection sees one state.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    index: usize,
    load: usize,
}

impl Candidate {
    fn new(index: usize, load: usize) -> Self {
        Self { index, load }
    }
}

/// Bounded consistent hashing load balancing policy
#[derive(Debug, Default)]
pub struct BoundedConsistentHashingPolicy {
    config: BoundedConsistentHashingConfig,
    turn: AtomicUsize,
}

impl BoundedConsistentHashingPolicy {
    /// Create a policy with the given configuration
    pub fn new(config: BoundedConsistentHashingConfig) -> Self {
        Self {
            config,
            turn: AtomicUsize::new(0),
        }
    }

    /// Create a policy with the default configuration
    pub fn with_defaults() -> Self {
        Self::default()
    }

    /// The highest load that is still eligible
    fn bound(&self, candidates: &HashMap<&str, Candidate>) -> f64 {
        let total: usize = candidates.values().map(|c| c.load).sum();
        let mean = (total + 1) as f64 / candidates.len() as f64;
        let relative = mean * self.config.load_factor;
        relative.max(mean + self.config.balance_abs_threshold as f64)
    }

    /// Home worker, ring successor or, when nobody is within the bound, home
    fn by_key(
        &self,
        ring: &HashRing,
        key: &str,
        candidates: &HashMap<&str, Candidate>,
    ) -> Option<(usize, Branch)> {
        let home = ring.find_healthy_url(key, |url| candidates.contains_key(url))?;
        let home = candidates[home];
        let bound = self.bound(candidates);
        let eligible = |load: usize| load as f64 <= bound;
        if eligible(home.load) {
            return Some((home.index, Branch::Home));
        }
        let successor = ring.find_healthy_url(key, |url| {
            candidates.get(url).is_some_and(|c| eligible(c.load))
        });
        match successor {
            Some(url) => Some((candidates[url].index, Branch::Spill)),
            None => Some((home.index, Branch::Fallback)),
        }
    }

    /// The least loaded worker; equals take turns in the order of the slice
    fn least_loaded(&self, candidates: &HashMap<&str, Candidate>) -> Option<usize> {
        let least = candidates.values().map(|c| c.load).min()?;
        let mut equals: Vec<usize> = candidates
            .values()
            .filter(|c| c.load == least)
            .map(|c| c.index)
            .collect();
        equals.sort_unstable();
        let turn = self.turn.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        Some(equals[turn % equals.len()])
    }

    fn select_worker_impl(
        &self,
        workers: &[Arc<dyn Worker>],
        info: &SelectWorkerInfo,
    ) -> (Option<usize>, Branch) {
        let candidates: HashMap<&str, Candidate> = workers
            .iter()
            .enumerate()
            .filter(|(_, w)| w.is_healthy_and_eligible())
            .map(|(index, w)| (w.url(), Candidate::new(index, w.load())))
            .collect();
        if candidates.is_empty() {
            return (None, Branch::NoHealthyWorkers);
        }

        let key = info
            .routing_key
            .or_else(|| extract_routing_key_hint(info.headers))
            .or(info.rid_key);
        if let Some(key) = key {
            let built;
            let ring = match info.hash_ring {
                Some(ref ring) => ring,
                // Callers normally pass the registry's ring; without it the
                // same ring is made from the workers at hand.
                None => {
                    built = Arc::new(HashRing::new(workers.iter().map(|w| w.url())));
                    &built
                }
            };
            if let Some((index, branch)) = self.by_key(ring, key, &candidates) {
                return (Some(index), branch);
            }
        }
        (self.least_loaded(&candidates), Branch::Unlabelled)
    }
}

impl LoadBalancingPolicy for BoundedConsistentHashingPolicy {
    fn select_worker(&self, workers: &[Arc<dyn Worker>], info: &SelectWorkerInfo) -> Option<usize> {
        let (result, branch) = self.select_worker_impl(workers, info);
        Metrics::record_worker_bounded_consistent_hashing_policy_branch(branch.as_str());
        result
    }

    fn name(&self) -> &'static str {
        "bounded_consistent_hashing"
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

#[cfg(test)]
mod tests;
