//! The two types that the policy's tests take from smg's protocol crate.

pub mod worker {
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum WorkerStatus {
        Ready,
        NotReady,
    }

    #[derive(Debug, Clone, Default)]
    pub struct HealthCheckConfig {
        pub disable_health_check: bool,
        pub timeout_secs: u64,
    }
}
