//! A crate with the shape of smg's gateway around the policy: the real policy, the
//! real hash ring, factory and policy configuration (all laid beside this file by the
//! test), stand-ins for the rest.

#![allow(dead_code)]

pub mod config;

pub mod observability {
    pub mod metrics {
        pub struct Metrics;

        impl Metrics {
            pub fn record_worker_bounded_consistent_hashing_policy_branch(_branch: &'static str) {}
        }
    }
}

pub mod routers {
    pub mod common {
        pub mod header_utils {
            use crate::policies::Headers;

            pub fn extract_routing_key_hint(headers: Option<&Headers>) -> Option<&str> {
                headers.and_then(|h| h.routing_key.as_deref())
            }
        }
    }
}

pub mod worker {
    use std::fmt::Debug;
    use std::sync::{
        atomic::{AtomicBool, AtomicUsize, Ordering},
        Arc,
    };

    use openai_protocol::worker::{HealthCheckConfig, WorkerStatus};

    pub use self::hash_ring::HashRing;

    mod hash_ring;

    pub enum WorkerType {
        Regular,
    }

    pub trait Worker: Send + Sync + Debug {
        fn url(&self) -> &str;
        fn load(&self) -> usize;
        fn is_healthy_and_eligible(&self) -> bool;
        fn increment_load(&self);
        fn set_status(&self, status: WorkerStatus);
    }

    #[derive(Debug)]
    pub struct BasicWorker {
        url: String,
        load: AtomicUsize,
        ready: AtomicBool,
    }

    impl Worker for BasicWorker {
        fn url(&self) -> &str {
            &self.url
        }

        fn load(&self) -> usize {
            self.load.load(Ordering::Relaxed)
        }

        fn is_healthy_and_eligible(&self) -> bool {
            self.ready.load(Ordering::Relaxed)
        }

        fn increment_load(&self) {
            self.load.fetch_add(1, Ordering::Relaxed);
        }

        fn set_status(&self, status: WorkerStatus) {
            self.ready
                .store(status == WorkerStatus::Ready, Ordering::Relaxed);
        }
    }

    pub struct BasicWorkerBuilder {
        url: String,
    }

    impl BasicWorkerBuilder {
        pub fn new(url: impl Into<String>) -> Self {
            Self { url: url.into() }
        }

        pub fn worker_type(self, _kind: WorkerType) -> Self {
            self
        }

        pub fn health_config(self, _config: HealthCheckConfig) -> Self {
            self
        }

        pub fn build(self) -> BasicWorker {
            BasicWorker {
                url: self.url,
                load: AtomicUsize::new(0),
                ready: AtomicBool::new(true),
            }
        }
    }

    pub type Workers = Vec<Arc<dyn Worker>>;
}

pub mod policies {
    use std::{fmt::Debug, sync::Arc};

    use crate::worker::{HashRing, Worker};

    pub use self::{
        bounded_consistent_hashing::{
            BoundedConsistentHashingConfig, BoundedConsistentHashingPolicy,
        },
        other_policies::*,
    };
    pub use crate::config::{BucketConfig, CacheAwareConfig, ManualConfig, PrefixHashConfig};

    pub mod bounded_consistent_hashing;
    mod factory;
    mod other_policies;

    #[derive(Debug, Default)]
    pub struct Headers {
        pub routing_key: Option<String>,
    }

    #[derive(Debug, Clone, Default)]
    pub struct SelectWorkerInfo<'a> {
        pub headers: Option<&'a Headers>,
        pub routing_key: Option<&'a str>,
        pub rid_key: Option<&'a str>,
        pub hash_ring: Option<Arc<HashRing>>,
    }

    pub trait LoadBalancingPolicy: Send + Sync + Debug {
        fn select_worker(
            &self,
            workers: &[Arc<dyn Worker>],
            info: &SelectWorkerInfo,
        ) -> Option<usize>;
        fn name(&self) -> &'static str;
        fn as_any(&self) -> &dyn std::any::Any;
    }
}
