//! r3router-engine
