// The size from which a loop over rows uses more than one thread.
#pragma once

constexpr long kSerial = 1 << 15;  // elements; smaller loops take less time than waking a second thread
