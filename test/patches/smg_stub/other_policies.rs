//! The policies that smg has already, reduced to their names and constructors, so that
//! the patched factory compiles beside them.

use std::{any::Any, sync::Arc};

use super::{LoadBalancingPolicy, SelectWorkerInfo};
use crate::{
    config::{
        BucketConfig, CacheAwareConfig, ManualConfig, PowerOfTwoLoadMetric, PrefixHashConfig,
    },
    worker::Worker,
};

macro_rules! policies {
    ($($policy:ident: $name:literal),* $(,)?) => {$(
        #[derive(Debug)]
        pub struct $policy;

        impl LoadBalancingPolicy for $policy {
            fn select_worker(
                &self,
                _workers: &[Arc<dyn Worker>],
                _info: &SelectWorkerInfo,
            ) -> Option<usize> {
                None
            }

            fn name(&self) -> &'static str {
                $name
            }

            fn as_any(&self) -> &dyn Any {
                self
            }
        }
    )*};
}

macro_rules! made_from_nothing {
    ($($policy:ident),*) => {$(
        impl $policy {
            pub fn new() -> Self {
                Self
            }
        }
    )*};
}

policies! {
    BucketPolicy: "bucket",
    CacheAwarePolicy: "cache_aware",
    ConsistentHashingPolicy: "consistent_hashing",
    LeastLoadPolicy: "least_load",
    ManualPolicy: "manual",
    PassthroughPolicy: "passthrough",
    PowerOfTwoPolicy: "power_of_two",
    PrefixHashPolicy: "prefix_hash",
    RandomPolicy: "random",
    RoundRobinPolicy: "round_robin",
}

made_from_nothing!(
    BucketPolicy,
    CacheAwarePolicy,
    ConsistentHashingPolicy,
    LeastLoadPolicy,
    ManualPolicy,
    PassthroughPolicy,
    PowerOfTwoPolicy,
    RandomPolicy,
    RoundRobinPolicy
);

impl BucketPolicy {
    pub fn with_config(_config: BucketConfig) -> Self {
        Self
    }
}

impl CacheAwarePolicy {
    pub fn with_config(_config: CacheAwareConfig) -> Self {
        Self
    }
}

impl ManualPolicy {
    pub fn with_config(_config: ManualConfig) -> Self {
        Self
    }
}

impl PrefixHashPolicy {
    pub fn new(_config: PrefixHashConfig) -> Self {
        Self
    }

    pub fn with_defaults() -> Self {
        Self
    }
}

impl PowerOfTwoPolicy {
    pub fn with_load_metric(_metric: PowerOfTwoLoadMetric) -> Self {
        Self
    }
}

impl LeastLoadPolicy {
    pub fn with_params(_weight: f64, _prefill: u32, _throughput: f64, _waiting: u32) -> Self {
        Self
    }
}
